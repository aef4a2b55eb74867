"""The law of a foreign verifier that takes uniforms: all drafts in turn, many uniforms each."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.stats import qmc

from jaxspec.audit import Instance
from jaxspec.audit.choices import Choices, exact_outcomes
from jaxspec.audit.instances import floats
from jaxspec.audit.reference import normalise
from jaxspec.audit.rounds import layout

EVALUATIONS = 2**14
"""Uniforms for all drafts together, at least 2^9 for each."""


def total_variation(
    verify: Callable[..., Any], instance: Instance, kind: str, uniforms: int
) -> float:
    """Return the distance of the emitted text from the target's law, up to about 5e-3."""
    tree = layout(instance)
    parents = np.asarray(tree.parents)
    target, draft = (
        {context: np.array(floats(row), np.float32) for context, row in (rows or {}).items()}
        for rows in (instance.target, instance.draft)
    )

    def row(table: dict[tuple, np.ndarray], context: tuple) -> np.ndarray:
        return table.get(context, table[()])

    def contexts(tokens: list[int]) -> list[tuple]:
        found: list[tuple] = [()]
        for node in range(1, len(tokens)):
            found.append((*found[parents[node]], tokens[node]))
        return found

    def drawn(choices: Choices) -> tuple[int, ...]:
        tokens = [-1]
        for node in range(1, len(parents)):
            q = row(draft, contexts(tokens)[parents[node]]).astype(float)
            if kind == "without_replacement":
                q[[tokens[m] for m in range(1, node) if parents[m] == parents[node]]] = 0
                q = normalise(q)
            tokens.append(choices.pick(f"draft {node}", q))
        return tuple(tokens)

    is_sampled = not kind.startswith("point_mass")
    drafts = exact_outcomes(drawn) if is_sampled else {tuple(np.asarray(tree.tokens).tolist()): 1.0}
    num = max(2**9, 2 ** ((EVALUATIONS // len(drafts)).bit_length() - 1))
    points = qmc.Sobol(uniforms, seed=0).random(num).astype(np.float32)
    points = np.minimum(points, np.float32(1 - 2**-24))
    length = tree.max_depth + 1
    law: Counter[tuple] = Counter()
    for tokens, mass in drafts.items():
        places = contexts(list(tokens))
        p = np.stack([row(target, place) for place in places])
        q = np.stack([row(draft, place) for place in places]) if is_sampled else None
        for u in points:
            if kind.endswith("path"):
                given = np.array(tokens[1:], np.int32), None if q is None else q[:-1], p
                emitted = verify(*given, u)
            else:
                emitted, _ = verify(np.array(tokens, np.int32), parents, q, p, u)
            kept = np.asarray(emitted).tolist()
            kept = tuple(kept[: kept.index(-1)] if -1 in kept else kept)
            law[kept] += mass / num
    distance = 0.0
    for text in np.ndindex(*[instance.vocab] * length):
        masses = [row(target, text[:n])[text[n]] for n in range(length)]
        seen = sum(
            mass * np.prod(masses[len(e) :]) for e, mass in law.items() if e == text[: len(e)]
        )
        distance += abs(seen - np.prod(masses))
    return float(distance) / 2
