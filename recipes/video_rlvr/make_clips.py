"""Short CLEVRER-like clips with questions of all five problem types, in the json format of Video-R1.

A clip shows three to five coloured shapes that move without friction and bounce off each other and off the walls, above
a line of text. The questions are about what the simulation did, so every answer is known: which two shapes touch first
(multiple choice), how often shapes touch (numerical), what is written (OCR), how a shape starts and what it touches
first (free-form), where a shape is in the last frame (regression). The format is that of Video-R1 (Feng et al., 2025);
clips and questions are our own, and the same arguments with the same versions of Pillow and PyAV give the same bytes.
"""

import argparse
import json
import math
import os
import random
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import av
from PIL import Image, ImageDraw, ImageFont

COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 210),
    "yellow": (235, 205, 30),
    "purple": (150, 50, 170),
}
SHAPES = ("circle", "square", "triangle")
BACKGROUND = (225, 225, 225)
INK = (20, 20, 20)
# Of the picture's side: radius of a shape, height of the line of text, lowest and highest speed per second.
RADIUS, LINE, SPEED = 0.085, 0.16, (0.15, 0.4)
SUBSTEPS = 16  # of a frame; no shape moves more than a fraction of its radius in one
LETTERS = "BDFGHKLMNPRSTVZ", "AEIOU"


@dataclass
class Thing:
    """A coloured shape: centre and speed per second, in sides of the picture; `start` is its speed at first."""

    name: str
    x: float
    y: float
    vx: float
    vy: float

    def __post_init__(self) -> None:
        self.start = (self.vx, self.vy)

    def direction(self) -> str | None:
        """Return the way it moves at first, None where that is not plainly one of four."""
        vx, vy = self.start
        if max(abs(vx), abs(vy)) < 2 * min(abs(vx), abs(vy)):
            return None
        if abs(vx) > abs(vy):
            return "right" if vx > 0 else "left"
        return "down" if vy > 0 else "up"


@dataclass
class Scene:
    """What happened: `places[frame]` holds each thing's centre, `touches` are (seconds, thing, thing) in order."""

    things: list[Thing]
    text: str
    places: list[list[tuple[float, float]]]
    touches: list[tuple[float, Thing, Thing]]

    def first_touched(self, thing: Thing) -> Thing | None:
        return next((b if a is thing else a for _, a, b in self.touches if thing in (a, b)), None)


def simulate(rng: random.Random, frames: int, fps: int) -> Scene:
    """Return a random scene of `frames` frames, whatever happens in it."""
    floor = 1 - LINE - RADIUS
    colours = rng.sample(list(COLOURS), rng.randint(3, 5))
    things: list[Thing] = []
    while len(things) < len(colours):
        x, y = rng.uniform(RADIUS, 1 - RADIUS), rng.uniform(RADIUS, floor)
        speed, angle = rng.uniform(*SPEED), rng.uniform(0, 2 * math.pi)
        if all(math.hypot(x - t.x, y - t.y) > 2.4 * RADIUS for t in things):
            name = f"{colours[len(things)]} {rng.choice(SHAPES)}"
            things.append(Thing(name, x, y, speed * math.cos(angle), speed * math.sin(angle)))
    scene = Scene(things, _text(rng), [], [])
    for frame in range(frames):
        scene.places.append([(t.x, t.y) for t in things])
        for step in range(SUBSTEPS):
            now = (frame + step / SUBSTEPS) / fps
            _move(scene, now, 1 / (SUBSTEPS * fps), floor)
    return scene


def _move(scene: Scene, now: float, seconds: float, floor: float) -> None:
    """Move every thing; equal masses that approach each other at two radii exchange their speeds along the line."""
    for t in scene.things:
        t.x, t.y = t.x + t.vx * seconds, t.y + t.vy * seconds
        if not RADIUS <= t.x <= 1 - RADIUS:
            t.vx = math.copysign(t.vx, 0.5 - t.x)
        if not RADIUS <= t.y <= floor:
            t.vy = math.copysign(t.vy, floor / 2 - t.y)
    for a, b in combinations(scene.things, 2):
        dx, dy = b.x - a.x, b.y - a.y
        distance = math.hypot(dx, dy)
        closing = ((a.vx - b.vx) * dx + (a.vy - b.vy) * dy) / distance
        if distance <= 2 * RADIUS and closing > 0:
            push = closing / distance
            a.vx, a.vy = a.vx - push * dx, a.vy - push * dy
            b.vx, b.vy = b.vx + push * dx, b.vy + push * dy
            scene.touches.append((now, a, b))


def _text(rng: random.Random) -> str:
    word = "".join(rng.choice(LETTERS[i % 2]) for i in range(4))
    return f"{word} {rng.randint(10, 99)} {''.join(rng.choice(LETTERS[i % 2]) for i in range(3))}"


def usable(scene: Scene, fps: int) -> bool:
    """Whether touches are few, not close to the ends of the clip, and far enough apart for their order to be seen."""
    times = [seconds for seconds, _, _ in scene.touches]
    marks = [0.0, *times, len(scene.places) / fps]
    return 1 <= len(times) <= 6 and all(late - early >= 2 / fps for early, late in zip(marks, marks[1:], strict=False))


def draw(scene: Scene, frame: int, size: int) -> Image.Image:
    """Return one frame, [size, size] in RGB; a later thing covers an earlier one."""
    image = Image.new("RGB", (size, size), BACKGROUND)
    pen = ImageDraw.Draw(image)
    radius = RADIUS * size
    for thing, (x, y) in zip(scene.things, scene.places[frame], strict=True):
        colour, shape = thing.name.split()
        circle = (x * size, y * size, radius)
        if shape == "circle":
            pen.ellipse(
                [circle[0] - radius, circle[1] - radius, circle[0] + radius, circle[1] + radius], COLOURS[colour]
            )
        else:
            pen.regular_polygon(circle, {"square": 4, "triangle": 3}[shape], fill=COLOURS[colour])
    font = ImageFont.load_default(size=LINE * size * 0.8)
    pen.text((size / 2, size * (1 - LINE / 2)), scene.text, INK, font, anchor="mm")
    return image


def write_video(path: Path, images: list[Image.Image], fps: int) -> None:
    """Write H.264 in mp4."""
    with av.open(str(path), "w") as container:
        # x264 writes its number of threads into the file.
        stream = container.add_stream("libx264", rate=fps, options={"crf": "16", "threads": "1"})
        stream.width, stream.height = images[0].size
        stream.pix_fmt = "yuv420p"
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())


def questions(scene: Scene, rng: random.Random) -> list[dict[str, object]]:
    """Return problem, problem_type, options and answer of the five questions about a clip."""
    _, first, second = scene.touches[0]
    pairs = [f"{a.name} and {b.name}" for a, b in combinations(scene.things, 2)]
    right = next(pair for pair in pairs if first.name in pair and second.name in pair)
    shown = rng.sample([pair for pair in pairs if pair != right], min(3, len(pairs) - 1)) + [right]
    rng.shuffle(shown)
    moving = next((t for t in scene.things if t.direction()), first)
    way = moving.direction() or "slantwise"
    touched = scene.first_touched(moving)
    end = f"touches the {touched.name} first" if touched else "touches no other shape"
    asked = rng.randrange(len(scene.things))
    return [
        {
            "problem": "Which two shapes touch each other first?",
            "problem_type": "multiple choice",
            "options": [f"{letter}. The {pair}." for letter, pair in zip("ABCD", shown, strict=False)],
            "answer": "ABCD"[shown.index(right)],
        },
        {
            "problem": "How many times do two shapes touch each other in the video?",
            "problem_type": "numerical",
            "options": [],
            "answer": str(len(scene.touches)),
        },
        {
            "problem": "What is written at the bottom of the video?",
            "problem_type": "OCR",
            "options": [],
            "answer": scene.text,
        },
        {
            "problem": f"Which way does the {moving.name} move at first, and what does it touch first?",
            "problem_type": "free-form",
            "options": [],
            "answer": f"The {moving.name} moves {way} and {end}.",
        },
        {
            "problem": f"Where is the centre of the {scene.things[asked].name} in the last frame? "
            "Give its distance from the left edge in percent of the picture's width.",
            "problem_type": "regression",
            "options": [],
            "answer": f"{100 * scene.places[-1][asked][0]:.1f}",
        },
    ]


def make_scene(rng: random.Random, frames: int, fps: int) -> Scene:
    """Return the first of the random scenes in which something can be asked."""
    while not usable(scene := simulate(rng, frames, fps), fps):
        pass
    return scene


def make_clips(output: Path, clips: int, stills: int, seed: int, seconds: int, fps: int, size: int) -> int:
    """Write `clips/*.mp4`, `stills/*.png` and, last, `questions.json` into `output`; return the number of questions.

    Raises:
        ValueError: a number is out of range.
    """
    for option, value, least in (("clips", clips, 1), ("stills", stills, 0), ("seconds", seconds, 2), ("fps", fps, 4)):
        if value < least:
            raise ValueError(f"--{option} {value}: set at least {least}")
    if seconds > 12:
        raise ValueError(f"--seconds {seconds}: set at most 12; in longer clips shapes touch too often to be counted")
    if size < 56 or size % 2:
        raise ValueError(f"--size {size}: set an even number of at least 56 pixels")
    rows: list[dict[str, object]] = []

    def add(question: dict[str, object], kind: str, path: str) -> None:
        row = {"problem_id": len(rows), "problem": question["problem"], "data_type": kind}
        row |= {"problem_type": question["problem_type"], "options": question["options"]}
        rows.append(row | {"solution": f"<answer>{question['answer']}</answer>", "path": f"./{path}"})

    (output / "clips").mkdir(parents=True, exist_ok=True)
    for i in range(clips):
        rng = random.Random(f"{seed}/clip/{i}")
        scene = make_scene(rng, seconds * fps, fps)
        path = f"clips/{i:05d}.mp4"
        write_video(output / path, [draw(scene, frame, size) for frame in range(len(scene.places))], fps)
        for question in questions(scene, rng):
            add(question, "video", path)
    if stills:
        (output / "stills").mkdir(exist_ok=True)
    for i in range(stills):
        scene = make_scene(random.Random(f"{seed}/still/{i}"), seconds * fps, fps)
        path = f"stills/{i:05d}.png"
        draw(scene, 0, size).save(output / path)
        question = {"problem": "How many coloured shapes are in the picture?", "problem_type": "numerical"}
        add(question | {"options": [], "answer": len(scene.things)}, "image", path)
    partial = output / f".questions.json.{os.getpid()}.partial"
    partial.write_text(json.dumps(rows, indent=1) + "\n")
    os.replace(partial, output / "questions.json")
    return len(rows)


def main(argv: list[str] | None = None) -> int:
    """Write clips and questions; return the exit status, 1 after one line on stderr where they cannot be written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--clips", type=int, default=16, help="clips, five questions each (default 16)")
    parser.add_argument("--stills", type=int, default=0, help="single pictures, one question each (default 0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=5, help="of a clip, 2 to 12 (default 5, CLEVRER's)")
    parser.add_argument("--fps", type=int, default=8, help="frames per second in the file (default 8)")
    parser.add_argument("--size", type=int, default=224, help="width and height in pixels (default 224)")
    args = parser.parse_args(argv)
    try:
        count = make_clips(**vars(args))
    except (ValueError, OSError) as error:
        print(f"make_clips: {error}", file=sys.stderr)
        return 1
    made = f"{count} questions, {args.clips} clips, {args.stills} stills"
    print(f"{args.output / 'questions.json'}: {made}, seed {args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
