"""Multi-hop questions about an invented world, in the format of MuSiQue-Ans v1.0.

Every entity of the world (novel, person, company, town, river, lake) has one paragraph, which states its relations to
other entities; every relation has one value and every name belongs to one entity. A question follows 2 to 4 relations
from a named entity; each hop is answered by another paragraph, so the answer exists, is unique, and needs every hop.
The other paragraphs are about entities of the same kinds. The format is that of Trivedi et al., TACL 2022; the text and
the world are our own, and the same arguments always give the same bytes.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

# Shares of 2, 3 and 4 hops near MuSiQue's, in an order that has all of them within 8 questions.
HOPS = (2, 2, 3, 2, 2, 3, 2, 4)
SHORT_HOPS = (2,)
WORDS = (60, 110)
SHORT_WORDS = (0, 0)  # facts alone


@dataclass(frozen=True)
class Relation:
    """A relation: its name, the kind of its value, how a question asks for the value, and two sentences that tell it.

    `target` is empty where the value is plain text without a paragraph, which ends a chain.
    """

    name: str
    target: str
    ask: str
    told: tuple[str, ...]


def _relations(table: str) -> dict[str, list[Relation]]:
    relations: dict[str, list[Relation]] = {}
    for line in table.strip().splitlines():
        kind, name, target, ask, *told = (cell.strip() for cell in line.split("|"))
        relations.setdefault(kind, []).append(Relation(name, target, ask, tuple(told)))
    return relations


# The relations of each kind of entity: {s} has the value {o}.
RELATIONS = _relations("""
novel   | author           | person  | Who        | {s} was written by {o}.        | The author of {s} is {o}.
novel   | publisher        | company | What       | {s} was published by {o}.      | The publisher of {s} is {o}.
novel   | publication year |         | What       | {s} first appeared in {o}.     | The first edition of {s} is of {o}.
person  | birthplace       | town    | Which town | {s} was born in {o}.           | {s} is a native of {o}.
person  | employer         | company | What       | {s} works for {o}.             | The employer of {s} is {o}.
person  | teacher          | person  | Who        | {s} was taught by {o}.         | The teacher of {s} was {o}.
company | founder          | person  | Who        | {s} was founded by {o}.        | The founder of {s} is {o}.
company | home town        | town    | Which town | {s} is based in {o}.           | The home town of {s} is {o}.
company | foundation year  |         | What       | {s} was founded in {o}.        | The register lists {s} since {o}.
town    | river            | river   | What       | {s} lies on the {o}.           | The {o} runs through {s}.
town    | district seat    | town    | Which town | {s} is in the district of {o}. | The district seat of {s} is {o}.
town    | mayor            | person  | Who        | The mayor of {s} is {o}.       | {s} is governed by its mayor, {o}.
river   | mouth            | lake    | Which lake | The {s} flows into {o}.        | The mouth of the {s} is at {o}.
river   | length           |         | What       | The {s} is {o} long.           | The length of the {s} is {o}.
lake    | largest island   |         | What       | No island in {s} beats {o}.    | The largest island in {s} is {o}.
lake    | greatest depth   |         | What       | {s} is up to {o} deep.         | The greatest depth of {s} is {o}.
""")

# Sentences that state no relation, with the words that can fill {x}.
FILLERS = {
    "novel": {
        "The story follows {x} through one long winter and ends where it began.": "two sisters, a retired clerk",
        "Critics of the time called the book {x} and argued about its last chapter for years.": "slow, daring, plain",
        "A later edition restored {x} that the first printer had left out for lack of paper.": "a preface, two maps",
        "It has been read aloud on the radio and is still taught in schools as a model of {x}.": "irony, patience",
        "The manuscript was kept for decades in {x} before anybody thought of copying it.": "a bakery, an attic",
        "The opening scene, set at {x}, is the part that most readers remember and quote.": "a market, a funeral",
    },
    "person": {
        "Colleagues remember a careful worker who liked {x} and answered every letter by hand.": "chess, old clocks",
        "A collection of {x} was left to the public and can be seen by appointment.": "letters, tools, sketches",
        "For some years illness made travel impossible, and most of the work was done from {x}.": "a barn, a flat",
        "Interviews were rare, and the few that exist are mostly about {x}.": "gardening, the weather, food, music",
        "A portrait painted late in life shows a tired face beside {x}.": "an open window, a brown dog, a lamp",
        "An early success with {x} brought a modest income and many visitors.": "translations, lectures, a patent",
    },
    "company": {
        "The firm began with {x} and a loan that was paid back within a few years.": "one lathe, two rooms, a cart",
        "At its height it kept several hundred people busy and ran {x} for their families.": "a school, a choir",
        "A fire in the {x} destroyed most of the early records, and the rest are incomplete.": "paint shop, archive",
        "Its products are known for {x} and are sold mainly through small shops.": "plain design, low weight",
        "A merger was discussed more than once, but the {x} always voted against it.": "owners, workers, board",
        "Visitors can see {x} of the old works on two afternoons a month.": "the boiler house, a model, the yard",
    },
    "town": {
        "The old quarter is known for {x} and for narrow streets that are closed to traffic.": "timber houses, arcades",
        "A fair in {x} draws visitors from the whole district and fills every inn.": "early spring, late autumn, June",
        "The railway came late, and the station still has its first {x}.": "roof, clock, waiting room, signal box",
        "Much of the work today is in {x}, while the old trades have almost gone.": "health care, repair shops, law",
        "After a flood the lower streets were raised by {x} and paved again.": "a metre, half a storey, two steps",
        "The council building holds a small museum of {x} that opens on request.": "weights, bells, ceramics, locks",
    },
    "river": {
        "Its upper course is steep and cold, and {x} are common below the falls.": "trout, herons, otters, alders",
        "Barges carried {x} on the lower stretch until the road was widened.": "salt, timber, slate, grain",
        "The water is {x} for most of the year and rises quickly after rain.": "clear, brown, shallow, green",
        "Three weirs were built to drive {x}, and one of them still turns.": "saw mills, hammer mills, paper mills",
        "A path for walkers follows the left bank, with {x} at regular intervals.": "benches, shelters, stone markers",
        "Old maps draw it too far to the {x}, an error that lasted for a century.": "north, south, east, west",
    },
    "lake": {
        "In cold winters the surface freezes, and people cross it {x} to save the long way.": "on skates, by sledge",
        "The shore is mostly {x}, with a few sandy bays where bathing is allowed.": "reeds, rock, meadow, forest",
        "Fishing is limited to {x}, and licences are drawn by lot each spring.": "small boats, four weeks",
        "It was formed by {x}, and its outline has hardly changed since the first survey.": "a glacier, a landslide",
        "A mail boat used to call at {x} twice a day and runs only in summer these days.": "five piers, ten hamlets",
        "Divers have found {x} in the mud near the outflow, all of them well preserved.": "dugout boats, coins, tools",
    },
}


@dataclass(frozen=True)
class Entity:
    """One thing of the world: its kind, its unique name, other accepted names, and its number."""

    kind: str
    name: str
    aliases: tuple[str, ...]
    number: int


class World:
    """`size` entities of each kind, their paragraphs, and `facts[name, relation]`, each an entity or a text."""

    def __init__(self, rng: random.Random, size: int, words: tuple[int, int] = WORDS) -> None:
        self.rng = rng
        self.words = words
        self.taken: set[str] = set()
        self.kinds = {kind: [self._entity(kind, i * size + j) for j in range(size)] for i, kind in enumerate(RELATIONS)}
        self.facts: dict[tuple[str, str], Entity] = {}
        self.texts: dict[str, str] = {}
        for kind, entities in self.kinds.items():
            for entity in entities:
                for relation in RELATIONS[kind]:
                    self.facts[entity.name, relation.name] = self._value(entity, relation)
                self.texts[entity.name] = self._paragraph(entity)

    def _word(self) -> str:
        """Return an invented word that no other name contains."""
        while True:
            syllables = [self.rng.choice("bdfghjklmnprstvz") + self.rng.choice("aeiou") for _ in range(3)]
            word = "".join(syllables).capitalize() + self.rng.choice("lmnrsk")
            if word not in self.taken:
                self.taken.add(word)
                return word

    def _entity(self, kind: str, number: int) -> Entity:
        word = self._word()
        if kind == "person":
            return Entity(kind, f"{word} {self._word()}", (), number)
        if kind == "novel":
            return Entity(kind, f"The {self.rng.choice(('House', 'Clock', 'Road', 'Garden'))} of {word}", (), number)
        if kind == "company":
            trade = self.rng.choice(("Printing", "Tools", "Shipping", "Glass"))
            return Entity(kind, f"{word} {trade}", (f"{word} {trade} Company",), number)
        if kind == "river":
            return Entity(kind, f"{word} River", (word, f"River {word}"), number)
        if kind == "lake":
            return Entity(kind, f"Lake {word}", (word,), number)
        return Entity(kind, word, (), number)

    def _other(self, kind: str, excluded: list[Entity]) -> Entity:
        while True:
            entity = self.rng.choice(self.kinds[kind])
            if entity not in excluded:
                return entity

    def _value(self, entity: Entity, relation: Relation) -> Entity:
        if relation.target:
            return self._other(relation.target, [entity])
        if relation.name == "largest island":
            return Entity("text", self._word(), (), -1)
        if relation.name == "length":
            km = self.rng.randint(21, 480)
            return Entity("text", f"{km} kilometres", (f"{km} km", f"{km}"), -1)
        if relation.name == "greatest depth":
            metres = self.rng.randint(14, 390)
            return Entity("text", f"{metres} metres", (f"{metres} m", f"{metres}"), -1)
        return Entity("text", str(self.rng.randint(1790, 1990)), (), -1)

    def _paragraph(self, entity: Entity) -> str:
        """Return the facts of the entity among sentences without facts, `words` words or a few more."""
        told = [
            self.rng.choice(relation.told).format(s=entity.name, o=self.facts[entity.name, relation.name].name)
            for relation in RELATIONS[entity.kind]
        ]
        enough = self.rng.randint(*self.words)
        for filler in self.rng.sample(list(FILLERS[entity.kind]), len(FILLERS[entity.kind])):
            if len(" ".join(told).split()) >= enough:
                break
            told.append(filler.format(x=self.rng.choice(FILLERS[entity.kind][filler].split(", "))))
        self.rng.shuffle(told)
        return " ".join(told)

    def chain(self, hops: int) -> tuple[list[Entity], list[Relation]]:
        """Return hops + 1 different entities and the relations that lead from each to the next."""
        while True:
            entities = [self.rng.choice(self.kinds[self.rng.choice(list(RELATIONS))])]
            relations: list[Relation] = []
            while len(relations) < hops and entities[-1].kind in RELATIONS:
                relations.append(self.rng.choice(RELATIONS[entities[-1].kind]))
                entities.append(self.facts[entities[-1].name, relations[-1].name])
            if len(relations) == hops and len(set(entities)) == hops + 1:
                return entities, relations

    def question(self, entities: list[Entity], relations: list[Relation], paragraphs: int) -> dict[str, object]:
        """Return the chain as one object of the official format, with `paragraphs` paragraphs in random order."""
        support, answer = entities[:-1], entities[-1]
        chosen = list(support)
        # From the last hop back: a lone paragraph of the kind that holds the answer would give the answer away.
        for kind in cycle([entity.kind for entity in reversed(support)]):
            if len(chosen) == paragraphs:
                break
            chosen.append(self._other(kind, chosen))
        self.rng.shuffle(chosen)

        subject = support[0].name
        steps = []
        for i, (entity, relation) in enumerate(zip(support, relations, strict=True)):
            steps.append(
                {
                    "id": entity.number * 10 + RELATIONS[entity.kind].index(relation),
                    "question": f"{subject if i == 0 else f'#{i}'} >> {relation.name}",
                    "answer": entities[i + 1].name,
                    "paragraph_support_idx": chosen.index(entity),
                }
            )
        for relation in relations[:-1]:
            subject = f"the {relation.name} of {subject}"
        return {
            "id": f"{len(steps)}hop__" + "_".join(str(step["id"]) for step in steps),
            "paragraphs": [
                {"idx": i, "title": e.name, "paragraph_text": self.texts[e.name], "is_supporting": e in support}
                for i, e in enumerate(chosen)
            ],
            "question": f"{relations[-1].ask} is the {relations[-1].name} of {subject}?",
            "question_decomposition": steps,
            "answer": answer.name,
            "answer_aliases": list(answer.aliases),
            "answerable": True,
        }


def make_questions(num: int, seed: int, paragraphs: int, short: bool = False) -> Iterator[dict[str, object]]:
    """Yield `num` different questions with `paragraphs` paragraphs each; ValueError where a number is out of range."""
    every, words = (SHORT_HOPS, SHORT_WORDS) if short else (HOPS, WORDS)
    if num < 1:
        raise ValueError(f"--num {num}: set at least 1")
    if paragraphs < max(every) + 1:
        raise ValueError(
            f"--paragraphs {paragraphs}: set at least {max(every) + 1}, "
            f"a {max(every)}-hop question needs {max(every)} and a distractor"
        )
    # Enough entities of a kind for the distractors, and enough chains for all questions to differ.
    world = World(random.Random(seed), size=max(24, paragraphs + max(every), num // 4), words=words)
    seen: set[str] = set()
    for hops in cycle(every):
        while True:
            question = world.question(*world.chain(hops), paragraphs)
            if question["id"] not in seen:
                break
        seen.add(question["id"])
        yield question
        if len(seen) == num:
            return


def main(argv: list[str] | None = None) -> int:
    """Write the questions; return the exit status, 1 after one line on stderr where they cannot be written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--num", type=int, default=64, help="questions (default 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paragraphs", type=int, default=20, help="paragraphs of a question (default 20, MuSiQue's)")
    parser.add_argument(
        "--short", action="store_true", help="2 hops each, and paragraphs of facts alone, about 25 words"
    )
    args = parser.parse_args(argv)
    partial = args.output.with_name(f".{args.output.name}.{os.getpid()}.partial")
    try:
        questions = make_questions(args.num, args.seed, args.paragraphs, args.short)
        lines = [json.dumps(question, ensure_ascii=False) + "\n" for question in questions]
        args.output.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes("".join(lines).encode())
        os.replace(partial, args.output)
    except (ValueError, OSError) as error:
        partial.unlink(missing_ok=True)
        print(f"make_questions: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {args.num} questions, {args.paragraphs} paragraphs each, seed {args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
