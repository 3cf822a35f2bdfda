"""Messages and rows for the data tests."""

from typing import Any


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def question(number: int, family: str = "math", **more: Any) -> dict[str, Any]:
    """A row whose length grows with its number."""
    answer = " ".join(["five"] * (1 + number))
    prompt = f"What is {number}?"
    return {"id": f"row-{number}", "family": family, "prompt": prompt, "answer": answer} | more
