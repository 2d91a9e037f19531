"""Published files -> the tables that jfi reads."""

import ast
import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from jfi.data import DataError

#: Sampled negatives for each positive of `amazon_office`, and the seed that draws them.
NEGATIVES, SEED = 4, 0


def table(names: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A CSV file of the rows, which are written as they come."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return out.getvalue()


def knowledge_tracing(text: str, name: str) -> str:
    """Three lines a student (number of exercises, their skills, 1 or 0 for right or wrong) -> a row an exercise.

    The user is the name and the number of the student in the file, and the timestamp the number of the exercise.

    >>> print(knowledge_tracing("2\\n7,9\\n1,0\\n", "test"), end="")
    user,position,skill,correct
    test-0,0,7,1
    test-0,1,9,0

    Raises:
        DataError: the lines are not of that form.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) % 3:
        raise DataError(f"{name}: {len(lines)} lines, must be three a student")

    def rows() -> Iterator[tuple]:
        for student in range(len(lines) // 3):
            count, skills, answers = lines[3 * student : 3 * student + 3]
            skills, answers = ([one for one in line.split(",") if one] for line in (skills, answers))
            if not int(count) == len(skills) == len(answers):
                found = f"{len(skills)} skills and {len(answers)} answers, must be {count} of each"
                raise DataError(f"{name}: student {student} has {found}")
            for position, (skill, answer) in enumerate(zip(skills, answers, strict=True)):
                yield f"{name}-{student}", position, skill, answer

    return table(("user", "position", "skill", "correct"), rows())


def assistments(files: Mapping[str, str]) -> dict[str, str]:
    """The files of ASSISTments2009-updated by name (train1 ... valid5, test) -> a table of interactions each."""
    return {f"{name}.csv": knowledge_tracing(text, name) for name, text in files.items()}


def next_items(validation: str, test: str, seed: int = SEED, negatives: int = NEGATIVES) -> str:
    """Rows of a user, the last 10 items and the next one, in the order of time -> interactions with sampled negatives.

    A user's first history becomes events without a label. Each next item is a positive, and `negatives` other items,
    drawn by how often they are a next item, are negatives of the same moment; `event` is 0 for them, since they are no
    part of histories. The timestamp is the place of the row among all rows, after those of the first histories.

    Args:
        validation, test: CSV with `user_id`, `history_item_id` (a list) and `item_id`.
        seed: of the negatives.
        negatives: for each positive.

    Raises:
        DataError: a row's history is not what the user's earlier rows say.
    """
    found = [*_next_rows(validation), *_next_rows(test)]
    items, counts = np.unique([item for _, _, item in found], return_counts=True)
    draw = np.random.default_rng(seed)
    longest = max(len(history) for _, history, _ in found)
    seen: dict[str, list[int]] = {}
    rows: list[tuple] = []
    for place, (user, history, item) in enumerate(found):
        if user not in seen:
            seen[user] = list(history)
            rows += [(user, one, at, 1, "") for at, one in enumerate(history)]
        elif seen[user][-len(history) :] != history:
            raise DataError(f"row {place + 1} of user {user}: the history does not continue the user's earlier rows")
        seen[user].append(item)
        time = longest + place
        rows.append((user, item, time, 1, 1))
        others = np.flatnonzero(~np.isin(items, seen[user]))
        share = counts[others] / counts[others].sum()
        drawn = draw.choice(items[others], size=negatives, replace=False, p=share)
        rows += [(user, int(one), time, 0, 0) for one in drawn]
    return table(("user", "item", "time", "event", "label"), rows)


def _next_rows(text: str) -> Iterator[tuple[str, list[int], int]]:
    """The user, the items before and the next item of each row."""
    csv.field_size_limit(1 << 24)
    for row in csv.DictReader(io.StringIO(text)):
        yield row["user_id"], ast.literal_eval(row["history_item_id"]), int(row["item_id"])


def office_items(items: str, codes: str) -> str:
    """Content and the published semantic IDs of `amazon_office`, a row an item; the codes are `code_0` to `code_2`."""
    described, coded = json.loads(items), json.loads(codes)
    columns = ("title", "description", "brand")
    rows = ((item, *(one[name] for name in columns), *coded[item]) for item, one in described.items())
    return table(("item", *columns, "code_0", "code_1", "code_2"), rows)
