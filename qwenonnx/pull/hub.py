"""Getting a checkpoint from the Hugging Face hub, or a mirror of it (HF_ENDPOINT).

`huggingface_hub` does the downloading: it resumes, shows progress, and knows HF_TOKEN. Around it: a quick
answer on machines without a network, one sentence for each way to fail, and a check of every file against the
hub's hashes.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwenonnx.errors import OfflineError, PullError
from qwenonnx.files import disk_full_named, require_space, sha256_file
from qwenonnx.pull.catalog import HUB_FILES

_PROBE_SECONDS = 5.0
_ANSWER_SECONDS = 20.0
_TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    """What the hub says about a file: LFS files have a SHA-256, others the id of their git blob."""

    name: str
    size: int | None
    sha256: str | None
    blob_id: str | None


def hub_endpoint() -> str:
    """The hub's address: HF_ENDPOINT, or the public one."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def download_from_hub(repo_id: str, folder: Path, patterns: Sequence[str] = HUB_FILES, revision: str = "main") -> None:
    """Downloads the files of a repository that match `patterns` into `folder`, and checks them.

    What an interrupted run has left in `folder` is used. All files are of one commit, whatever happens
    meanwhile.

    Raises:
        OfflineError: HF_HUB_OFFLINE is set, or the hub does not answer (found out within a few seconds).
        PullError: there is no such repository or file, it needs a token, or a file arrived damaged.
        DiskSpaceError: there is no room for the files.
    """
    endpoint = hub_endpoint()
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE:
        raise OfflineError(f"HF_HUB_OFFLINE is set, so {repo_id} is not downloaded; unset it to use {endpoint}.")
    _probe(endpoint)
    from huggingface_hub import HfApi, hf_hub_download

    with _one_sentence(repo_id, endpoint):
        info = HfApi(endpoint=endpoint).model_info(
            repo_id, revision=revision, files_metadata=True, timeout=_ANSWER_SECONDS
        )
    files = [
        _remote_file(sibling)
        for sibling in info.siblings or []
        if any(fnmatch.fnmatchcase(sibling.rfilename, pattern) for pattern in patterns) and "/" not in sibling.rfilename
    ]
    if not any(file.name.endswith((".safetensors", ".gguf")) for file in files):
        raise PullError(_nothing_to_download(repo_id, patterns, [sibling.rfilename for sibling in info.siblings or []]))
    files.sort(key=lambda file: file.size or 0)  # the weights last: what is wrong with the rest shows early
    folder.mkdir(parents=True, exist_ok=True)
    missing = [file.size or 0 for file in files if not (folder / file.name).exists()]
    require_space(folder, sum(missing))
    for file in files:
        with _one_sentence(repo_id, endpoint), _interruption(repo_id, endpoint), disk_full_named(folder):
            hf_hub_download(repo_id, file.name, revision=info.sha, local_dir=folder, endpoint=endpoint)
        _check(repo_id, folder, file)


def _nothing_to_download(repo_id: str, patterns: Sequence[str], names: Sequence[str]) -> str:
    gguf_files = [name for name in names if name.endswith(".gguf")]
    if not gguf_files:
        return f"{repo_id}: the repository has no weights in safetensors or GGUF files."
    choice = f"{', '.join(gguf_files[:4])}{', ...' if len(gguf_files) > 4 else ''}"
    if patterns is HUB_FILES:
        return f"{repo_id}: the repository has GGUF files; name one as {repo_id}:FILE ({choice})."
    return f"{repo_id}: the repository has no file {patterns[0]}, but {choice}."


def _remote_file(sibling: Any) -> _RemoteFile:
    lfs = sibling.lfs
    return _RemoteFile(sibling.rfilename, sibling.size, lfs.sha256 if lfs else None, sibling.blob_id)


def _probe(endpoint: str) -> None:
    """Asks the hub for any answer at all; names that do not resolve can block for long, hence the thread."""
    from huggingface_hub import get_session

    failures: list[Exception] = []

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=_PROBE_SECONDS)
        except Exception as error:  # whatever the HTTP library of this version raises
            failures.append(error)

    thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
    thread.start()
    thread.join(_PROBE_SECONDS)
    if thread.is_alive():
        raise _no_answer(endpoint, f"nothing came within {_PROBE_SECONDS:.0f} s")
    if failures:
        raise _no_answer(endpoint, type(failures[0]).__name__) from failures[0]


def _no_answer(endpoint: str, reason: str) -> OfflineError:
    return OfflineError(f"{endpoint} does not answer ({reason}); check the network, or set HF_ENDPOINT to a mirror.")


@contextlib.contextmanager
def _one_sentence(repo_id: str, endpoint: str) -> Iterator[None]:
    """Turns what huggingface_hub and the HTTP library below it raise into errors for the user."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise PullError(
            f"{repo_id}: access is granted only to those who have accepted its terms at "
            f"{endpoint}/{repo_id}; accept them and set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise PullError(f"{repo_id}: the repository has no such revision.") from error
    except errors.RepositoryNotFoundError as error:
        raise PullError(
            f"{endpoint} has no model {repo_id}; check the spelling, or set HF_TOKEN if the model is private."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise _no_answer(endpoint, "no connection") from error
    except errors.EntryNotFoundError as error:
        raise PullError(f"{repo_id}: the hub lists a file that it does not have; pull again later.") from error
    except errors.HFValidationError as error:
        raise PullError(f"{repo_id!r} is not the id of a model on the hub (owner/name).") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            raise PullError(f"{repo_id}: the hub refuses access (status {status}); check HF_TOKEN.") from error
        raise _no_answer(endpoint, f"it reports an error, status {status}") from error
    except Exception as error:
        if not _is_of_http_library(error):
            raise
        raise _no_answer(endpoint, type(error).__name__) from error


@contextlib.contextmanager
def _interruption(repo_id: str, endpoint: str) -> Iterator[None]:
    """Tells a download that broke off from a hub that does not answer at all: it is resumed, not replaced."""
    from huggingface_hub import errors

    try:
        yield
    except errors.LocalEntryNotFoundError as error:
        raise PullError(_broken_off(repo_id, endpoint, "no connection")) from error
    except errors.HfHubHTTPError:
        raise
    except Exception as error:
        # A file that is shorter than announced is a plain OSError.
        if not _is_of_http_library(error) and type(error) is not OSError:
            raise
        raise PullError(_broken_off(repo_id, endpoint, type(error).__name__)) from error


def _broken_off(repo_id: str, endpoint: str, reason: str) -> str:
    return f"{repo_id}: the download from {endpoint} broke off ({reason}); what has arrived is kept, so pull again."


def _is_of_http_library(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] in ("requests", "urllib3", "httpx", "httpcore")


def _check(repo_id: str, folder: Path, file: _RemoteFile) -> None:
    path = folder / file.name
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        problem = f"it has {size:,} bytes instead of {file.size:,}"
    elif file.sha256 is not None and sha256_file(path) != file.sha256:
        problem = f"its SHA-256 is not {file.sha256}"
    elif file.sha256 is None and file.blob_id is not None and _git_blob_id(path) != file.blob_id:
        problem = f"its git blob id is not {file.blob_id}"
    else:
        return
    path.unlink()  # so that the next attempt does not take it for whole
    raise PullError(f"{repo_id}: {file.name} arrived damaged ({problem}) and was deleted; pull again.")


def _git_blob_id(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
