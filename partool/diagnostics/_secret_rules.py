"""Data that identify secrets: the forms of tokens, and the words with which names of secrets end.

The prefixes, alphabets and lengths are facts that the services publish and that the rule sets of ``SOURCES`` collect;
no text or code of these sets is used. Each pattern takes time in proportion to the text: it begins at a fixed word that
does not follow the pattern's own characters, and holds no two repetitions that could match the same characters.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = {
    "gitleaks": ("https://github.com/gitleaks/gitleaks/blob/v8.28.0/config/gitleaks.toml", "MIT"),
    "detect-secrets": ("https://github.com/Yelp/detect-secrets/tree/v1.5.0/detect_secrets/plugins", "Apache-2.0"),
    "rfc6750": ("https://www.rfc-editor.org/rfc/rfc6750#section-2.1", "facts of a standard"),
    "rfc3986": ("https://www.rfc-editor.org/rfc/rfc3986#section-3.2.1", "facts of a standard"),
    "vendor": ("the service's own page on its tokens", "facts"),
}
"""Name of a source of these facts → its address and licence."""


@dataclass(frozen=True, slots=True)
class SecretForm:
    """One form that secrets have.

    ``begins``: lower-case words, one of which must be in the lower-cased text before the pattern is tried. ``pattern``:
    regular expression of the secret; if it has a group ``secret``, only that group is hidden.
    """

    what: str
    """Description of the secret, such as "a token of GitHub"."""
    begins: tuple[str, ...]
    pattern: str
    source: str = "gitleaks"


def _token(what: str, prefixes: str, alphabet: str, least: int, source: str = "gitleaks") -> SecretForm:
    """Return the form of a token: one of the prefixes, then at least ``least`` characters of an alphabet."""
    words = prefixes.split()
    choice = "|".join(word.replace(".", r"\.") for word in words)
    return SecretForm(
        what, tuple(word.lower() for word in words), rf"(?<![A-Za-z0-9])(?:{choice})[{alphabet}]{{{least},}}", source
    )


_ALNUM, _WORD, _DASHED, _HEX, _CAPITAL = "A-Za-z0-9", "A-Za-z0-9_", r"A-Za-z0-9_\-", "a-f0-9", "A-Z0-9"
FORMS: tuple[SecretForm, ...] = (
    _token("a token of Hugging Face", "hf_ api_org_", _ALNUM, 16),
    _token("a token of GitHub", "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_", _WORD, 16),
    _token("a token of GitLab", "glpat- gldt- glrt- glcbt- glptt- glft- glsoat- glimt- glagent-", _DASHED, 16),
    _token("a token of npm", "npm_", _ALNUM, 30),
    _token("a token of PyPI", "pypi-Ag", _DASHED, 40),
    _token("a token of Docker Hub", "dckr_pat_ dckr_oat_", _DASHED, 20, "vendor"),
    _token("a key of Stripe", "sk_live_ sk_test_ rk_live_ rk_test_ sk_prod_ rk_prod_ whsec_", _ALNUM, 10),
    _token("a token of Slack", "xoxa- xoxb- xoxe- xoxo- xoxp- xoxr- xoxs- xapp-", "A-Za-z0-9-", 10),
    _token("a key of OpenAI or Anthropic", "sk-proj- sk-svcacct- sk-admin- sk-ant- sk-or-", _DASHED, 16),
    _token("a key of OpenAI", "sk-", _ALNUM, 32),
    _token("a token of Vault", "hvs. hvb. hvr.", _DASHED, 20),
    _token("a token of Google", "ya29.", _DASHED + ".", 20, "vendor"),
    _token("a key of Google", "AIza GOCSPX-", _DASHED, 24),
    SecretForm(
        "a key id of AWS",
        ("akia", "asia", "abia", "acca"),
        r"(?<![A-Za-z0-9])(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}(?![A-Za-z0-9])",
    ),
    _token("a key of AWS Bedrock", "ABSK", "A-Za-z0-9+/", 100),
    _token("a token of DigitalOcean", "dop_v1_ doo_v1_ dor_v1_", _HEX, 40),
    _token("a token of Databricks", "dapi", _HEX, 32),
    _token("a key of NVIDIA", "nvapi-", _DASHED, 30, "vendor"),
    _token("a key of Replicate", "r8_", _ALNUM, 30, "vendor"),
    _token("a key of Perplexity or Groq", "pplx- gsk_", _ALNUM, 30),
    _token("a token of Grafana", "glsa_ glc_", _WORD + "+/=", 30),
    _token("a token of Shopify", "shpat_ shpca_ shppa_ shpss_", _ALNUM, 30),
    _token("a token of Atlassian", "ATATT3", _DASHED + "=", 50),
    _token("a token of Linear or Notion", "lin_api_ ntn_", _ALNUM, 30),
    _token("a token of Doppler", "dp.pt. dp.st. dp.sa.", _ALNUM, 30),
    _token("a token of Pulumi", "pul-", _HEX, 40),
    _token("a token of PlanetScale", "pscale_tkn_ pscale_pw_ pscale_oauth_", _DASHED, 30),
    _token("a token of Sentry", "sntrys_ sntryu_", _WORD + "+/=", 30),
    _token("a key of Tailscale", "tskey-", _DASHED, 16),
    _token("a key of New Relic or Postman", "NRAK- PMAK-", _DASHED, 20),
    _token("a key of age", "AGE-SECRET-KEY-1", _CAPITAL, 50),
    SecretForm("a key of SendGrid", ("sg.",), rf"(?<![{_DASHED}.])SG\.[{_DASHED}]{{16,80}}\.[{_DASHED}]{{16,}}"),
    SecretForm("a token of Telegram", (":aa",), rf"(?<![0-9])[0-9]{{8,10}}:AA[{_DASHED}]{{32,}}"),
    SecretForm(
        "a token of Terraform", (".atlasv1.",), rf"(?<![{_ALNUM}])[{_ALNUM}]{{14}}\.atlasv1\.[{_DASHED}=]{{40,}}"
    ),
    SecretForm(
        "a JSON Web Token", ("eyj",), rf"(?<![{_DASHED}])eyJ[{_DASHED}]{{10,}}\.[{_DASHED}]{{10,}}[{_DASHED}.]*"
    ),
    SecretForm(
        "a private key",
        ("-----begin",),
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END[A-Z0-9 ]{0,60}-----|\Z)",
    ),
    SecretForm(
        "a bearer token",
        ("bearer", "basic"),
        r"(?i)\b(?:bearer[ \t]{1,3}(?=[a-z.~+/_-]{0,200}[0-9=])|basic[ \t]{1,3}(?=[a-z+/]{0,200}[0-9=])"
        r"(?-i:(?=[a-z0-9+/]{0,200}[A-Z])))"
        r"(?P<secret>[a-z0-9.~+/_-]{12,}=*)",
        "rfc6750",
    ),
    SecretForm(
        "the value of an Authorization header",
        ("authorization",),
        r"(?i)authorization[\"']?[ \t]{0,3}[:=][ \t]{0,3}(?P<secret>[^\s\"',;}][^\n\"',;}]{5,})",
        "rfc6750",
    ),
    SecretForm(
        "a password in an address",
        ("://",),
        r"://[^/@:\s]{0,256}:(?!\$\{?[A-Za-z_]\w{0,99}\}?@)(?P<secret>[^/@\s]{1,1024})@",
        "rfc3986",
    ),
    SecretForm(
        "a password in an address",
        ("@",),
        # The host has a dot, as package@1.2/x has after a version, or a port, or is this machine.
        r"(?<=[A-Za-z0-9_%+.-]):(?![0-9]{1,2}@)(?P<secret>[^/@:\s\"'{}$]{1,256})"
        r"@(?=localhost|[0-9.]{7,15}[:/]|[A-Za-z0-9-]{0,63}[A-Za-z][A-Za-z0-9-]{0,63}[.:])[A-Za-z0-9][A-Za-z0-9.-]{0,253}(?::[0-9]{1,5})?/",
        "detect-secrets",
    ),
    SecretForm(
        "a key of Azure",
        ("accountkey=", "sharedaccesskey=", "sharedaccesssignature="),
        r"(?i)(?:account|sharedaccess)(?:key|signature)=(?P<secret>[^;\s\"']{12,})",
        "detect-secrets",
    ),
    SecretForm(
        "a signed address",
        ("sig=", "signature="),
        r"(?i)[?&](?:sig|x-amz-signature|x-goog-signature|signature)=(?P<secret>[a-z0-9%+/=_-]{24,})",
        "vendor",
    ),
)

ENDINGS = ("PASSWORD", "PASSWD", "PASSPHRASE", "PASSCODE", "SECRET", "TOKEN", "CREDENTIAL", "CREDENTIALS", "APIKEY")
"""Words that mark a secret if the last word of a name is or ends with one of them (plugin of detect-secrets)."""
WORDS = {"PASS", "PWD", "PW", "CREDS", "CRED", "PSK", "PAT", "JWT", "BEARER"}
"""Words that mark a secret if a name of several words ends with one of them (PWD alone is the current folder)."""
KEYS = {
    "API", "ACCESS", "SECRET", "PRIVATE", "AUTH", "SIGNING", "SIGNATURE", "ENCRYPTION", "DECRYPTION", "CRYPTO",
    "MASTER", "SSH", "DEPLOY", "LICENSE", "LICENCE", "ACCOUNT", "STORAGE", "HMAC", "SESSION", "CLIENT", "ADMIN", "APP",
    "SHARED", "RSA", "GPG", "PGP", "AES", "WEBHOOK", "SUBSCRIPTION", "SERVICE", "ROOT", "HOST", "TLS", "SSL", "COOKIE",
}  # fmt: skip
"""Words that mark a secret if a name ends with one of them followed by KEY, such as ``API_KEY``."""
ANYWHERE = ("PASSWORD", "PASSWD", "PASSPHRASE")
"""Words that mark a secret if any word of a name ends with one of them and the name's last word is not in ``ABOUT``."""
ABOUT = {
    "FILE", "PATH", "DIR", "NAME", "LENGTH", "POLICY", "ID", "ARN", "REF", "URL", "URI", "TTL", "VERSION", "REGION",
    "HASH", "MIN", "MAX", "TYPE", "KIND", "COUNT", "ENABLED", "REQUIRED", "SECRETNAME", "COMMAND", "CMD",
}  # fmt: skip
"""Last words, such as FILE in ``PASSWORD_FILE``, of names whose values describe a secret but are not secret."""
OF_TEXT = {
    "PAD", "BOS", "EOS", "UNK", "MASK", "SEP", "CLS", "EOT", "EOM", "BOI", "EOI", "IMAGE", "AUDIO", "VIDEO", "STOP",
    "END", "START", "BEGIN", "NEXT", "LAST", "FIRST", "SPECIAL", "EXTRA", "PREFIX", "SUFFIX", "MIDDLE", "FIM", "MAX",
    "MIN", "NUM", "PER", "BLANK", "NEWLINE", "DECODER", "ENCODER", "TEXT", "PADDING", "MULTI",
}  # fmt: skip
"""Words before TOKEN in names of vocabulary tokens, such as ``EOS_TOKEN``."""
PASSES = {"FORWARD", "BACKWARD", "ONE", "TWO", "SINGLE", "MULTI", "NUM", "FIRST", "SECOND", "LAST", "FINAL", "EACH"}
"""Words before PASS in names of passes over data, such as ``FORWARD_PASS``."""
SENTENCES = {
    "a", "an", "and", "are", "as", "at", "be", "because", "but", "by", "can", "cannot", "could", "did", "do", "does",
    "for", "from", "had", "has", "have", "if", "in", "is", "it", "its", "may", "must", "no", "not", "nothing", "of",
    "on", "only", "or", "should", "than", "that", "the", "their", "there", "these", "they", "this", "those", "to",
    "was", "were", "what", "when", "where", "whether", "which", "who", "whose", "will", "with", "without", "would",
    "you", "your",
}  # fmt: skip
"""Words with which English sentences go on behind a name (``secret hub: it cannot be read``) and that are no secret."""
