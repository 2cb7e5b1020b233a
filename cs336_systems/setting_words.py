"""How a setting of a run is said in a few words, in labels, titles and names of files."""

MAX_WORD = 40
"""Characters of one setting in words, such as a path."""

_ALONE = frozenset(
    ("size", "mode", "precision", "attention", "sdpa_backend", "optimizer", "arch", "model_factory", "device_name",
     "device", "profiler")
)  # fmt: skip
"""Settings whose values say what they are of."""
_WORDS = {
    "context_length": "ctx", "batch_size": "batch", "checkpoint_blocks": "checkpoint", "pad_vocabulary": "padded to",
    "cuda_graph": "graph", "learning_rate": "lr", "warmup_steps": "warm-up", "measured_steps": "steps",
    **{name: name for name in ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "rope_theta")},
}  # fmt: skip


def in_words(name: str, value: object) -> str:
    """A setting in a few words: `batch 8`, `no ranges`; empty for unknown."""
    word = _WORDS.get(name, name.replace("_", " "))
    if value is None or isinstance(value, bool):
        return "" if value is None else word if value else f"no {word}"
    text = text_of(value)
    short = text if len(text) <= MAX_WORD else f"{text[: MAX_WORD // 2 - 1]}…{text[-MAX_WORD // 2 :]}"
    return short if name in _ALONE else f"{'#' if name == 'repeat' else f'{word} '}{short}"


def text_of(value: object) -> str:
    """A setting as text: numbers as short as they stay exact; empty for unknown."""
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return "" if value is None else str(value)
