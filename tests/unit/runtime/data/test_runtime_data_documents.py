"""Document boundaries in packed sequences, for ``data.attend: document``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from data_case import open_one, write_tokens

from partool.spec.data import DataSpec
from partool.spec.model import ModelConfig
from partool_runtime.data.batches import IGNORED_LABEL, Batches, MicroBatch
from partool_runtime.model import Decoder

LENGTH = 7
SIZES = ((5, 1, 0, 9, 2), (3, 17, 1, 1), (4,))
"""Token counts of the documents of three files; a row of 8 holds parts of several, and one document fills two rows."""


def corpus(folder: Path) -> list[int]:
    """Write files of documents and return the document of every token; tokens count through the corpus, from 1."""
    owners = [-1]
    number = 0
    for name, sizes in zip("abc", SIZES, strict=True):
        mine = [number + place for place, size in enumerate(sizes) for _ in range(size)]
        tokens = list(range(len(owners), len(owners) + len(mine)))
        np.array([0, *np.cumsum(sizes)], dtype="<i8").tofile(folder / f"{name}.documents.bin")
        write_tokens(folder / f"{name}.bin", tokens, documents=f"{name}.documents.bin")
        owners += mine
        number += len(sizes)
    return owners


def opened(folder: Path, **fields: object) -> Batches:
    data = DataSpec.model_validate({"source": str(folder), "attend": "document"} | fields)
    return open_one(data, vocab=1000, sequence_length=LENGTH, global_batch=2, micro_batch=2)


def everything(batches: Batches, *, held_out: bool) -> list[MicroBatch]:
    return list(batches.validation()) if held_out else [micro for step in range(9) for micro in batches.step(step)]


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_documents_are_those_of_the_tokens(tmp_path: Path, share: float, held_out: bool) -> None:
    owners = np.array(corpus(tmp_path))
    several = 0
    with opened(tmp_path, validation=share) as batches:
        for micro in everything(batches, held_out=held_out):
            assert micro.documents_BL is not None
            assert micro.documents_BL.dtype == torch.int32
            assert micro.documents_BL.shape == micro.tokens_BS.shape
            rows = zip(micro.tokens_BS.numpy(), micro.labels_BS.numpy(), micro.documents_BL.numpy(), strict=True)
            for tokens, labels, documents in rows:
                real = int((tokens > 0).sum())  # padding is token 0
                same = owners[tokens[:real, None]] == owners[tokens[None, :real]]
                assert np.array_equal(same, documents[:real, None] == documents[None, :real])
                assert (np.diff(documents) >= 0).all()
                assert documents[0] == 0
                known = labels != IGNORED_LABEL
                assert (owners[tokens[known]] == owners[labels[known]]).all()
                # Apart from padding, only the last token of a document predicts nothing.
                real_tokens = tokens[:real]
                ends = owners[real_tokens[:-1]] != owners[real_tokens[1:]]
                assert np.array_equal(~known[: len(ends)], ends)
                several += documents[-1] > 0
    assert several > 0 or (held_out and share == 0)


def test_documents_are_left_out_where_they_do_not_matter(tmp_path: Path) -> None:
    corpus(tmp_path)
    for fields in ({"attend": "sequence"}, {"pack": False}):
        with opened(tmp_path, **fields) as batches:
            assert all(micro.documents_BL is None for micro in batches.step(0))


def test_another_rule_is_another_run(tmp_path: Path) -> None:
    """The fingerprint depends on the rule; that of a run older than the rule is unchanged."""
    corpus(tmp_path)
    found = set()
    for attend in ("sequence", "document"):
        with opened(tmp_path, attend=attend) as batches:
            found.add(batches.fingerprint)
    assert len(found) == 2


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("window", [None, 3])
def test_a_packed_document_trains_as_if_it_were_alone(position: str, window: int | None) -> None:
    sizes = (5, 1, 2, 6)
    kinds = {"window": window, "layer_types": ("sliding", "full")} if window else {}
    fields = {"layers": 2, "hidden": 8, "ffn_hidden": 7, "heads": 2, "kv_heads": 1, "head_dim": 4, "vocab": 11} | kinds
    torch.manual_seed(0)
    model = Decoder(ModelConfig.model_validate(fields | {"position": position, "max_position": 14})).double()
    tokens = torch.randint(11, (1, sum(sizes) + 1))
    labels = tokens[:, 1:].clone()
    ends = np.cumsum(sizes)
    labels[:, ends - 1] = IGNORED_LABEL
    numbers = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), torch.tensor(sizes))[None]
    together = model(tokens[:, :-1], labels, numbers)
    alone = sum(
        model(tokens[:, end - size : end], labels[:, end - size : end]) for size, end in zip(sizes, ends, strict=True)
    )
    names = [name for name, _ in model.named_parameters()]
    found, wanted = (torch.autograd.grad(loss, list(model.parameters())) for loss in (together, alone))
    for name, mine, other in zip(["loss", *names], [together, *found], [alone, *wanted], strict=True):
        assert float((mine - other).detach().abs().max()) <= 1e-12, name
    assert abs(float((model(tokens[:, :-1], labels) - together).detach())) > 1e-6
