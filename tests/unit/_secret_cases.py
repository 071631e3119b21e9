"""Random secrets of every kind that the rules know, and values that only look like secrets."""

from __future__ import annotations

import base64
import random
import string
from pathlib import Path

_ALNUM = string.ascii_letters + string.digits
_DASHED = _ALNUM + "-_"
PREFIXES = {
    "hf_": (_ALNUM, 34), "ghp_": (_ALNUM, 36), "gho_": (_ALNUM, 36), "ghs_": (_ALNUM, 36), "ghr_": (_ALNUM, 36),
    "github_pat_": (_ALNUM + "_", 82), "glpat-": (_DASHED, 20), "npm_": (_ALNUM, 36), "pypi-Ag": (_DASHED, 80),
    "dckr_pat_": (_DASHED, 27), "sk_live_": (_ALNUM, 24), "rk_test_": (_ALNUM, 24), "xoxb-": (_ALNUM, 30),
    "sk-": (_ALNUM, 48), "sk-ant-": (_DASHED, 60), "sk-proj-": (_DASHED, 60), "hvs.": (_DASHED, 90),
    "hvb.": (_DASHED, 90), "ya29.": (_DASHED, 60), "AIza": (_DASHED, 35), "GOCSPX-": (_DASHED, 28),
    "AKIA": (string.ascii_uppercase, 16), "ASIA": (string.ascii_uppercase, 16),
    "dop_v1_": ("0123456789abcdef", 64), "dapi": ("0123456789abcdef", 32),
    "nvapi-": (_DASHED, 64), "glsa_": (_ALNUM, 41), "r8_": (_ALNUM, 37), "gsk_": (_ALNUM, 52),
}  # fmt: skip
"""Prefix of a kind of token → its alphabet and length."""
NAMES = [
    "HF_TOKEN", "PGPASSWORD", "DB_PASS", "SIGNING_KEY", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MYSQL_PWD", "apiKey",
    "clientSecret", "github_token", "MY_PASSPHRASE", "ADMIN_CREDENTIALS", "TOKEN_2", "SSH_PRIVATE_KEY", "JWT_SECRET",
    "ENCRYPTION_KEY", "registryPassword", "REDIS_PASSWORD_PROD", "DEPLOY_PAT", "NPM_AUTH_TOKEN",
]  # fmt: skip


def token(rng: random.Random) -> str:
    """Return a token that is recognised by its form."""
    prefix = rng.choice(list(PREFIXES))
    alphabet, length = PREFIXES[prefix]
    return prefix + "".join(rng.choices(alphabet, k=length))


def word(rng: random.Random) -> str:
    """Return a password as people choose them, which cannot be recognised by its form."""
    return "".join(rng.choices(_ALNUM, k=rng.randint(8, 24))) + rng.choice(["", "!", "-x", "_y"])


def valued(rng: random.Random) -> tuple[str, str]:
    """Return a text that is recognised as a secret by its form, and the part of it that must never be shown."""
    password, made = word(rng).rstrip("!"), token(rng)
    packed = base64.b64encode(rng.randbytes(48)).decode()
    web = ".".join(base64.urlsafe_b64encode(b'{"a":' + rng.randbytes(20) + b"}").decode().rstrip("=") for _ in range(2))
    return rng.choice(
        [
            (made, made),
            (made, made),
            (made, made),
            (f"Bearer {packed}", packed[:40]),
            (f"{web}.{packed.replace('+', '-').replace('/', '_')}", web),
            (f"redis://:{password}@cache.example.com:6379/0", password),
            (f"postgres://me:{password}@db/x", password),
            (f"me:{password}@registry.example.com/team/train:1", password),
            (f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={packed}==", packed),
            (
                f"https://a.blob.core.windows.net/c?sv=2024&sig={packed.replace('+', '%2B').replace('/', '%2F')}",
                packed[-8:],
            ),
            (f"--token={password} --x 1", password),
            (f"A=1 {rng.choice(NAMES)}={password}", password),
            (f"Authorization: Basic {packed}", packed[:40]),
        ]
    )


def pem(rng: random.Random) -> tuple[str, list[str]]:
    """Return a private key over several lines, and the lines that must never be shown."""
    body = [base64.b64encode(rng.randbytes(48)).decode() for _ in range(rng.randint(2, 5))]
    kind = rng.choice(["RSA ", "", "OPENSSH ", "EC ", "ENCRYPTED "])
    return "\n".join([f"-----BEGIN {kind}PRIVATE KEY-----", *body, f"-----END {kind}PRIVATE KEY-----"]), body


def innocent() -> list[tuple[str, str]]:
    """Return names and values of ordinary variables, as found in users' specs."""
    lines = (Path(__file__).parents[1] / "data" / "innocent_variables.txt").read_text(encoding="utf-8").splitlines()
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]
