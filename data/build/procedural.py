"""Seeded generators of short code and chat exchanges, written for this project.

They widen the two small real sources (codeio, chatterbot-corpus) to a domain that a model of three
million parameters can learn. Every function takes a `random.Random` and returns (template,
question, answer); `template` names the pattern, so that whole patterns can be held out.
"""

from random import Random

NAMES = [
    "values", "numbers", "items", "scores", "prices", "ages", "sizes", "weights", "heights",
    "totals", "marks", "readings",
]  # fmt: skip
TESTS = {
    "even": ("the even numbers", "{x} % 2 == 0"),
    "odd": ("the odd numbers", "{x} % 2 == 1"),
    "positive": ("the positive numbers", "{x} > 0"),
    "negative": ("the negative numbers", "{x} < 0"),
    "above": ("the numbers above {n}", "{x} > {n}"),
    "below": ("the numbers below {n}", "{x} < {n}"),
    "multiples": ("the multiples of {n}", "{x} % {n} == 0"),
}
FOLDS = {
    "sum": ("the sum of", "0", "total += {x}"),
    "count": ("the count of", "0", "total += 1"),
    "product": ("the product of", "1", "total *= {x}"),
    "squares": ("the sum of the squares of", "0", "total += {x} ** 2"),
}
OPENERS = (
    "Here is a function that does this:",
    "You can write it like this:",
    "Sure. Here is one way to do it:",
)
CLOSERS = (
    "It takes linear time, because each element is visited once.",
    "It returns {empty} when the list is empty.",
    "You can call it with any list of numbers.",
)
ELEMENTS = ["x", "value", "item", "n", "number"]


def _fenced(rng: Random, code: str, empty: str) -> str:
    opener, closer = rng.choice(OPENERS), rng.choice(CLOSERS).format(empty=empty)
    return f"{opener}\n\n```python\n{code}\n```\n\n{closer}"


def fold_function(rng: Random) -> tuple[str, str, str]:
    test, fold = rng.choice(list(TESTS)), rng.choice(list(FOLDS))
    name, x, n = rng.choice(NAMES), rng.choice(ELEMENTS), rng.randint(2, 50)
    group, condition = (part.format(x=x, n=n) for part in TESTS[test])
    phrase, start, update = FOLDS[fold]
    function = f"{fold}_{test}"
    question = (
        f"Write a Python function called {function} that takes a list called {name} "
        f"and returns {phrase} {group}."
    )
    code = (
        f"def {function}({name}):\n"
        f'    """Return {phrase} {group} in {name}."""\n'
        f"    total = {start}\n"
        f"    for {x} in {name}:\n"
        f"        if {condition}:\n"
        f"            {update.format(x=x)}\n"
        f"    return total"
    )
    return f"fold-{fold}", question, _fenced(rng, code, start)


def filter_function(rng: Random) -> tuple[str, str, str]:
    test = rng.choice(list(TESTS))
    name, x, n = rng.choice(NAMES), rng.choice(ELEMENTS), rng.randint(2, 50)
    group, condition = (part.format(x=x, n=n) for part in TESTS[test])
    verb = rng.choice(("keep", "select", "filter"))
    question = (
        f"Write a Python function that returns a new list with only {group} "
        f"of a list called {name}."
    )
    code = (
        f"def {verb}_{test}({name}):\n"
        f'    """Return a list of {group} in {name}."""\n'
        f"    return [{x} for {x} in {name} if {condition}]"
    )
    return f"filter-{test}", question, _fenced(rng, code, "an empty list")


FIELDS = {
    "name": "str", "title": "str", "city": "str", "author": "str", "color": "str", "owner": "str",
    "age": "int", "year": "int", "pages": "int", "count": "int", "score": "int", "speed": "int",
    "price": "float", "weight": "float", "height": "float", "rating": "float", "length": "float",
}  # fmt: skip
CLASSES = [
    "Book", "Person", "Car", "Movie", "Planet", "Recipe", "Player", "Product", "Animal", "Ticket",
    "House", "Song", "City", "Tool",
]  # fmt: skip


def record_class(rng: Random) -> tuple[str, str, str]:
    noun, fields = rng.choice(CLASSES), rng.sample(list(FIELDS), rng.randint(2, 4))
    listing = ", ".join(fields[:-1]) + f" and {fields[-1]}"
    if rng.random() < 0.5:
        question = f"Write a Python dataclass called {noun} with the fields {listing}."
        body = "\n".join(f"    {field}: {FIELDS[field]}" for field in fields)
        code = f"from dataclasses import dataclass\n\n\n@dataclass\nclass {noun}:\n{body}"
        return "dataclass", question, f"{rng.choice(OPENERS)}\n\n```python\n{code}\n```"
    question = (
        f"Write a Python class called {noun} that stores {listing} and has a describe method."
    )
    arguments = ", ".join(f"{field}: {FIELDS[field]}" for field in fields)
    body = "\n".join(f"        self.{field} = {field}" for field in fields)
    text = ", ".join(f"{field}={{self.{field}}}" for field in fields)
    code = (
        f"class {noun}:\n    def __init__(self, {arguments}):\n{body}\n\n"
        f'    def describe(self) -> str:\n        return f"{noun}({text})"'
    )
    return "class", question, f"{rng.choice(OPENERS)}\n\n```python\n{code}\n```"


STRINGS = {
    "count the vowels": ("count_vowels", "sum(1 for letter in text.lower() if letter in 'aeiou')"),
    "reverse the words": ("reverse_words", "' '.join(reversed(text.split()))"),
    "check for a palindrome": ("is_palindrome", "text.lower() == text.lower()[::-1]"),
    "count the words": ("count_words", "len(text.split())"),
    "capitalize each word": (
        "capitalize_words",
        "' '.join(word.capitalize() for word in text.split())",
    ),
    "find the longest word": ("longest_word", "max(text.split(), key=len)"),
    "remove the spaces": ("remove_spaces", "text.replace(' ', '')"),
    "count the digits": ("count_digits", "sum(1 for letter in text if letter.isdigit())"),
    "find the unique letters": ("unique_letters", "sorted(set(text.lower()))"),
    "shorten it to {n} characters": ("shorten", "text[:{n}]"),
    "repeat it {n} times": ("repeat", "text * {n}"),
    "split it at the letter {l}": ("split_at", "text.split('{l}')"),
    "count the letter {l}": ("count_letter", "text.count('{l}')"),
}


def string_function(rng: Random) -> tuple[str, str, str]:
    task = rng.choice(list(STRINGS))
    function, expression = STRINGS[task]
    name = rng.choice(["text", "line", "sentence", "message", "phrase", "word", "title"])
    filled = {"n": rng.randint(2, 40), "l": rng.choice("abcdefghijklmnoprstuvw")}
    goal, body = task.format(**filled), expression.format(**filled).replace("text", name)
    question = f"Write a Python function that takes a string called {name} to {goal}."
    code = f'def {function}({name}: str):\n    """Take {name} to {goal}."""\n    return {body}'
    return f"string-{function}", question, f"{rng.choice(OPENERS)}\n\n```python\n{code}\n```"


FOODS = [
    "rice", "eggs", "pasta", "beans", "tomatoes", "potatoes", "cheese", "chicken", "fish",
    "mushrooms", "spinach", "carrots", "lentils",
]  # fmt: skip
DISHES = {
    "soup": "simmer everything in one pot for {n} minutes",
    "salad": "mix everything in a bowl and add oil and lemon",
    "stew": "cook it slowly for {n} minutes with the lid on",
    "curry": "fry the spices first and let it cook for {n} minutes",
    "omelette": "whisk it well and fry it on low heat",
    "casserole": "bake it for {n} minutes until the top is golden",
}
HOBBIES = {
    "painting": ("a set of brushes", "quiet and creative"),
    "hiking": ("a good pair of boots", "healthy and free"),
    "chess": ("a board and a patient friend", "hard but rewarding"),
    "gardening": ("some seeds and a little soil", "slow and calming"),
    "cycling": ("a bike and a helmet", "fast and good for you"),
    "photography": ("a camera or a phone", "creative and easy to start"),
    "cooking": ("a sharp knife and a pan", "useful every day"),
    "reading": ("a library card", "cheap and relaxing"),
    "swimming": ("a pool nearby", "good for the whole body"),
    "music": ("an instrument and some time", "fun with other people"),
}
PLACES = [
    "the beach", "the mountains", "a big city", "a small village", "a forest", "an island",
    "a lake", "the desert",
]  # fmt: skip
SEASONS = ["spring", "summer", "autumn", "winter"]
PEOPLE = [
    "my brother", "my sister", "my friend", "my mother", "my father", "my teacher", "a colleague",
    "my neighbor",
]  # fmt: skip
GIFTS = [
    "a good book", "a warm scarf", "a box of tea", "a plant", "a board game", "a cooking class",
    "a nice notebook",
]  # fmt: skip


def dinner(rng: Random) -> tuple[str, str, str]:
    first, second = rng.sample(FOODS, 2)
    dish = rng.choice(list(DISHES))
    question = rng.choice(
        ("What can I cook with {a} and {b}?", "I have {a} and {b}. What should I make for dinner?")
    )
    how = DISHES[dish].format(n=rng.choice((15, 20, 30, 40)))
    taste = rng.choice(
        (
            "Add salt and pepper to taste.",
            "It goes well with fresh bread.",
            "It is ready when it smells good.",
        )
    )
    answer = f"You could make a {dish} with {first} and {second}. To do that, {how}. {taste}"
    return "dinner", question.format(a=first, b=second), answer


def hobby(rng: Random) -> tuple[str, str, str]:
    name = rng.choice(list(HOBBIES))
    need, feel = HOBBIES[name]
    who = rng.choice(PEOPLE)
    days = rng.randint(2, 6)
    question = rng.choice(
        (
            f"Is {name} a good hobby for {who}?",
            f"How do I start with {name} if I have {days} free evenings a week?",
            f"Tell {who} why {name} is fun.",
        )
    )
    end = rng.choice(
        (
            "Start small and enjoy it.",
            "The rest comes with practice.",
            "Try it for a month and see how it feels.",
        )
    )
    answer = (
        f"I think {name} is a great hobby, because it is {feel}. "
        f"All you need to begin is {need}. {end}"
    )
    return "hobby", question, answer


def trip(rng: Random) -> tuple[str, str, str]:
    place, season, days = rng.choice(PLACES), rng.choice(SEASONS), rng.randint(2, 9)
    question = f"I want to travel to {place} for {days} days in {season}. What should I pack?"
    wear = {
        "spring": "a light jacket and an umbrella",
        "summer": "a hat, sunscreen and light clothes",
        "autumn": "a warm sweater and good shoes",
        "winter": "a thick coat, gloves and a scarf",
    }[season]
    extra = rng.choice(
        (
            "Do not forget your charger.",
            "Leave some room in your bag.",
            "A good book is never wrong.",
        )
    )
    answer = (
        f"For {days} days at {place} in {season}, I would pack {wear}. {extra} Have a nice trip!"
    )
    return "trip", question, answer


def gift(rng: Random) -> tuple[str, str, str]:
    who, age, interest = rng.choice(PEOPLE), rng.randint(18, 80), rng.choice(list(HOBBIES))
    one, two = rng.sample(GIFTS, 2)
    question = f"What is a good gift for {who}, who is {age} and likes {interest}?"
    answer = (
        f"For someone who likes {interest}, {HOBBIES[interest][0]} would be nice. "
        f"You could also give {one} or {two}."
    )
    return "gift", question, answer


FEELINGS = {
    "tired": ("Try to sleep a little earlier", "rest"),
    "bored": ("Call a friend or learn something new", "a change"),
    "nervous": ("Take a few slow breaths", "time"),
    "sad": ("Talk to someone you trust", "company"),
    "angry": ("Go for a walk before you answer", "distance"),
    "lonely": ("Join a club or call your family", "people"),
}
CAUSES = [
    "work", "school", "an exam", "a long week", "the weather", "a test", "a meeting", "the news",
    "a trip", "a cold",
]  # fmt: skip


def feeling(rng: Random) -> tuple[str, str, str]:
    mood, cause, days = rng.choice(list(FEELINGS)), rng.choice(CAUSES), rng.randint(2, 14)
    advice, need = FEELINGS[mood]
    question = f"I have been {mood} for {days} days because of {cause}. What should I do?"
    sorry = rng.choice(("I am sorry to hear that.", "That happens to everyone.", "I understand."))
    answer = (
        f"{sorry} When you are {mood} because of {cause}, you may need {need}. "
        f"{advice}, and be kind to yourself."
    )
    return "feeling", question, answer


CODE = (fold_function, fold_function, filter_function, record_class, record_class, string_function)
CHAT = (dinner, hobby, trip, gift, feeling)
