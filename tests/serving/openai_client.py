"""The `openai` package against a server: streamed or not, and a second turn; JSON on stdout."""

import json
import sys

from openai import OpenAI

OPTIONS = {
    "temperature": 0.0,
    "max_tokens": 64,
    "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
}


def main() -> None:
    url, model, first, second = sys.argv[1:]
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    turns = [{"role": "user", "content": first}]
    whole = client.chat.completions.create(model=model, messages=turns, **OPTIONS)
    pieces = client.chat.completions.create(model=model, messages=turns, stream=True, **OPTIONS)
    streamed = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    answer = whole.choices[0].message.content
    turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": second}]
    again = client.chat.completions.create(model=model, messages=turns, **OPTIONS)
    print(
        json.dumps(
            {
                "answer": answer,
                "streamed": "".join(streamed),
                "pieces": sum(bool(piece) for piece in streamed),
                "tokens": whole.usage.completion_tokens,
                "second": again.choices[0].message.content,
            }
        )
    )


if __name__ == "__main__":
    main()
