"""What workers and their ranks import, imported once by the fork server; see `warm`. Nothing is run: no thread, no random number."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would start with the import
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", "0")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import deepspeed
import peft  # noqa: F401 - preloaded
import torch  # noqa: F401 - preloaded
from tests.chaos import worker_main  # noqa: F401 - preloaded
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM  # noqa: F401 - preloaded

from headrace.consumers.worker.admission import admit  # noqa: F401 - preloaded
from headrace.trainer import engine  # noqa: F401 - preloaded

assert deepspeed.__version__
