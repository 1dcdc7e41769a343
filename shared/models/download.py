"""Downloads a model by its hub name into the hub's cache, in a process of its own: it can be killed at any moment.

A call ``[name, revision, is_small]`` tells ``[bytes done, bytes in all]`` while it loads, and is answered by the
commit. ``HF_ENDPOINT``, ``HF_HOME``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` hold; the token is written nowhere.
"""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from flotilla.shared.children.serving import progress_of_call, serve
from flotilla.shared.errors import ModelError, Unavailable
from flotilla.shared.models.hub import cache_directory, repository_directory

SMALL_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
WEIGHTS_SUFFIX = ".safetensors"
PAUSES_SECONDS = (1.0, 4.0)
"""Between tries of a file whose connection broke, which then continues where it was."""
TELL_SECONDS = 1.0


def wanted(files: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Choose what makes a model, small files first: tokenizer, config, safetensors at the top of the repository."""
    chosen = [
        (name, size)
        for name, size in files
        if len(PurePosixPath(name).parts) == 1 and name.endswith((*SMALL_SUFFIXES, WEIGHTS_SUFFIX))
    ]
    # The config marks the small files as complete, and the weights mark all.
    return sorted(chosen, key=lambda file: (file[0].endswith(WEIGHTS_SUFFIX), file[0] == "config.json", file))


def download(name: str, revision: str | None, *, is_small: bool) -> str:
    """Download a model and return its commit; what is in the cache already is not loaded again.

    Raises:
        ModelError: there is no such model or revision, or the hub refuses it.
        Unavailable: the hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    api = HfApi()
    try:
        info = api.model_info(name, revision=revision, files_metadata=True, timeout=20.0)
        files = wanted([(sibling.rfilename, sibling.size or 0) for sibling in info.siblings or ()])
        if is_small:
            files = [file for file in files if not file[0].endswith(WEIGHTS_SUFFIX)]
        with _Telling(name, sum(size for _, size in files)):
            # By its branch first: that notes in the cache which commit the branch is.
            for number, (file, _) in enumerate(files):
                _download(api, name, file, (revision or "main") if number == 0 else info.sha)
    except RevisionNotFoundError:
        raise ModelError(f"the hub's model {name} has no revision {revision!r} (model.revision)") from None
    except GatedRepoError:
        raise ModelError(
            f"the hub's model {name} is gated: accept its conditions at {api.endpoint}/{name}, and set HF_TOKEN to a "
            f"token of that account for every service that loads it ({_token_said()})"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"there is no model {name} on the hub ({api.endpoint}), or it is private and needs HF_TOKEN "
            f"({_token_said()}); if a folder was meant, give its absolute path"
        ) from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        if status in {401, 403}:
            raise ModelError(f"the hub refuses {name} with status {status}: set HF_TOKEN ({_token_said()})") from None
        raise Unavailable(_unreachable(name, revision, api.endpoint, f"status {status}")) from None
    except Exception as error:  # the HTTP client underneath raises errors of its own
        cause = "HF_HUB_OFFLINE is set" if "offline" in type(error).__name__.lower() else _line(error)
        raise Unavailable(_unreachable(name, revision, api.endpoint, cause)) from None
    return str(info.sha)


def _download(api: Any, name: str, file: str, revision: str) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    for pause in (*PAUSES_SECONDS, None):
        try:
            api.hf_hub_download(name, file, revision=revision)
            return
        except HfHubHTTPError:
            raise
        except Exception:  # as above: a connection that broke
            if pause is None:
                raise
            time.sleep(pause)


def _unreachable(name: str, revision: str | None, endpoint: str, cause: str) -> str:
    at = f" --revision {revision}" if revision else ""
    folder = name.rpartition("/")[2]
    return (
        f"the hub ({endpoint}) cannot be reached for {name}: {cause}. Where there is a network run "
        f"`hf download {name}{at} --local-dir {folder}`, copy the folder to this machine and set model.path to its "
        f"absolute path; or copy the cache of that machine to {cache_directory()}"
    )


def _token_said() -> str:
    is_set = bool(os.environ.get("HF_TOKEN"))
    return "one is set here" if is_set else "none is set here"


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}"[:300] if text else type(error).__name__


class _Telling:
    """Writes how far it is, about once per second, while the block runs."""

    def __init__(self, name: str, total_bytes: int) -> None:
        self._blobs = repository_directory(name) / "blobs"
        self._total_bytes = total_bytes
        self._ended, self._tell = threading.Event(), progress_of_call()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            is_last = self._ended.wait(TELL_SECONDS)
            sizes = [blob.stat().st_size for blob in self._blobs.glob("*")] if self._blobs.is_dir() else []
            # Other revisions' files may be there as well.
            self._tell([min(sum(sizes), self._total_bytes), self._total_bytes])
            if is_last:
                return


class Downloads:
    """Downloads what a call names; see above."""

    about = None

    def handle(self, content: Any) -> str:
        """Download a model; errors as of ``download``, and where huggingface_hub is not installed."""
        name, revision, is_small = content
        try:
            return download(name, revision, is_small=is_small)
        except ImportError:
            words = "a hub name as model.path needs huggingface_hub: pip install 'flotilla[hub]'"
            raise ModelError(words) from None


if __name__ == "__main__":
    serve(lambda _: Downloads())
