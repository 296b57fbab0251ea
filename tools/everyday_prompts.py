"""Write everyday prompts for a small chat model: `python tools/everyday_prompts.py build/real` writes two JSONL files.

Every prompt is a request for a short text about an everyday thing. Held-out prompts are about other things.
"""

import argparse
import json
import random
from itertools import product
from pathlib import Path

REQUESTS = (
    "Describe {} in one sentence.",
    "Why do people like {}? Answer in one sentence.",
    "Give me one short tip about {}.",
    "Write a title for a story about {}.",
    "Explain {} to a child in one or two sentences.",
    "Write a friendly message to a friend about {}. Keep it short.",
    "What should I know about {}? Keep it short.",
    "Write one sentence about {} that makes me smile.",
    "Write a short question about {}.",
    "What do people often get wrong about {}? Answer briefly.",
    "Write the first sentence of a novel that begins with {}.",
    "Say something kind about {}.",
)
THINGS = (
    *("a summer garden", "rain on a window", "fresh bread", "an old bicycle", "the night sky", "a quiet library"),
    *("a busy market", "the first snow", "a long train ride", "a good night's sleep", "a cup of tea", "wild birds"),
    *("a small village", "learning to swim", "a birthday party", "a walk in the woods", "old photographs", "a storm"),
    *("home cooking", "a pet cat", "a loyal dog", "house plants", "morning coffee", "the ocean", "a mountain hike"),
    *("city parks", "a street musician", "hand-written letters", "a family dinner", "the autumn leaves", "honey bees"),
    *("a public bus", "a farm", "the local bakery", "a camping trip", "a good book", "board games", "a school play"),
    *("a lighthouse", "a river", "healthy food", "a day at the beach", "an open fire", "a rainbow", "sunrise"),
    *("a hot bath", "the dentist", "a new neighbour", "a job interview", "a first day at school", "moving house"),
    *("a power cut", "a lost key", "a sore throat", "a long queue", "spring cleaning", "a broken phone", "traffic"),
    *("apples", "cheese", "chocolate", "soup", "potatoes", "ice cream", "lemons", "rice", "garlic", "carrots"),
    *("painting", "knitting", "running", "dancing", "fishing", "singing", "gardening", "chess", "photography", "yoga"),
    *("doctors", "teachers", "firefighters", "farmers", "nurses", "pilots", "carpenters", "musicians", "writers"),
    *("elephants", "owls", "dolphins", "spiders", "horses", "penguins", "butterflies", "frogs", "wolves", "turtles"),
)
OTHER_THINGS = (
    *("a harbour", "a picnic", "winter evenings", "a museum", "a wooden table", "the moon", "a violin", "a bridge"),
    *("strawberries", "pancakes", "cycling", "pottery", "librarians", "gardeners", "foxes", "swans"),
)


def prompts(things: tuple[str, ...], seed: int) -> list[str]:
    made = [request.format(thing) for request, thing in product(REQUESTS, things)]
    random.Random(seed).shuffle(made)
    return made


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, things in (("train", THINGS), ("held_out", OTHER_THINGS)):
        lines = [json.dumps({"prompt": text}) for text in prompts(things, seed=0)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("folder", type=Path, help="where train.jsonl and held_out.jsonl go")
    write(parser.parse_args().folder)
