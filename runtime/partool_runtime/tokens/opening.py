"""The files of a ``data`` section, and the source that their token cache is made from."""

from __future__ import annotations

from collections.abc import Sequence

from partool.plan.data_files import NoFilesError, SourceFile, find_files
from partool.plan.records import DataError
from partool.spec.data import DataSpec
from partool_runtime.errors import ConfigurationError
from partool_runtime.tokens.sources import TextSource, TokenSource
from partool_runtime.tokens.tokenizers import open_tokenizer


def files_of(data: DataSpec) -> list[SourceFile]:
    """Return the files of a ``data`` section; raises ConfigurationError PT601 if there are none, PT602 for others."""
    try:
        return find_files(data.source, data.format)
    except DataError as error:
        code = "PT601" if isinstance(error, NoFilesError) else "PT602"
        raise ConfigurationError(code, str(error), error.help) from error


def source_of(files: Sequence[SourceFile], data: DataSpec) -> TokenSource:
    """Return what the cache of some files is made from."""
    if data.is_text:
        return TextSource(files, open_tokenizer(data.tokenizer, data.special_tokens), data.text_field)
    from partool_runtime.tokens.conversations import ConversationSource  # jinja2 is not needed for texts

    return ConversationSource(files, data)
