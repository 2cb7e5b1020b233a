"""How sentences say counts."""


def counted(count: int, noun: str) -> str:
    """The count with its noun: `1 block`, `2,000 blocks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
