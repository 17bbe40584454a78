"""The token by which the supervisors of a run know one another: given, or made by the head."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from ftrain.errors import ConfigError

TOKEN_VARIABLE = "FTRAIN_TOKEN"
TOKEN_FILE = "token"  # in the run directory, readable by its owner alone
LEAST_BYTES = 16


def given_token(environ: Mapping[str, str], token_file: str | None) -> bytes | None:
    """The token that the user gave, by `--token-file` or in the environment; None if none.

    Raises:
      ConfigError: it cannot be read, or is so short that it could be guessed.
    """
    if token_file is not None:
        try:
            with open(token_file, "rb") as file:
                return _checked(file.read(1 << 16).strip(), f"--token-file {token_file}")
        except OSError as error:
            raise ConfigError(
                f"--token-file {token_file}: {error.strerror}; write {LEAST_BYTES} bytes or more "
                "there, the same on every host"
            ) from None
    if environ.get(TOKEN_VARIABLE):
        return _checked(os.fsencode(environ[TOKEN_VARIABLE]).strip(), TOKEN_VARIABLE)
    return None


def _checked(token: bytes, where: str) -> bytes:
    if len(token) < LEAST_BYTES:
        raise ConfigError(
            f"{where}: a token of {len(token)} bytes can be guessed; make one with "
            "`openssl rand -hex 32`"
        )
    return token


def make_token(run_dir: str) -> bytes:
    """The run directory's own token, made if there is none; for the head."""
    path = os.path.join(run_dir, TOKEN_FILE)
    found = read_token(run_dir)
    if found is not None:
        os.chmod(path, 0o600)
        return found
    part = f"{path}.{secrets.token_hex(4)}"
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, secrets.token_hex(32).encode() + b"\n")
    finally:
        os.close(fd)
    os.replace(part, path)  # whole or not there, for those who wait for it
    return read_token(run_dir) or b""


def read_token(run_dir: str) -> bytes | None:
    """The token that the head wrote into a shared run directory; None if it is not there yet."""
    try:
        with open(os.path.join(run_dir, TOKEN_FILE), "rb") as file:
            token = file.read(1 << 16).strip()
    except FileNotFoundError:
        return None
    return token if len(token) >= LEAST_BYTES else None
