"""The exact law of a foreign verifier that takes uniforms: all drafts in turn, by search."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxspec.audit import Instance, search
from jaxspec.audit.choices import Choices, exact_outcomes
from jaxspec.audit.instances import floats
from jaxspec.audit.reference import normalise
from jaxspec.audit.rounds import layout


def total_variation(
    verify: Callable[..., Any], instance: Instance, kind: str, uniforms: int
) -> float:
    """Return the distance of the emitted text from the target's law, up to about 1e-6."""
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
    length = tree.max_depth + 1

    def emitted(tokens: Any, p: Any, q: Any, u: Any) -> np.ndarray:
        tokens, p, q, u = (None if x is None else np.asarray(x) for x in (tokens, p, q, u))
        if kind.endswith("path"):
            found = verify(tokens[1:], None if q is None else q[:-1], p, u)
        else:
            found, _ = verify(tokens, parents, q, p, u)
        kept = np.asarray(found)[: length + 1]
        return np.pad(kept, (0, length + 1 - len(kept)), constant_values=-1).astype(np.int32)

    def play(world: Any, u: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((length + 1,), np.int32)
        return jax.pure_callback(emitted, shape, *world, u, vmap_method="sequential")

    law: Counter[tuple] = Counter()
    for tokens, mass in drafts.items():
        places = contexts(list(tokens))
        p = np.stack([row(target, place) for place in places])
        q = np.stack([row(draft, place) for place in places]) if is_sampled else None
        world = np.array(tokens, np.int32), p, q
        cells = search(play, world, uniforms, range(uniforms), batch=16, replays=1)
        assert cells.misses == 0
        for outcome, volume in zip(cells.outcomes.tolist(), cells.mass.tolist(), strict=True):
            kept = outcome[: outcome.index(-1)] if -1 in outcome else outcome
            law[tuple(kept)] += mass * volume
    distance = 0.0
    for text in np.ndindex(*[instance.vocab] * length):
        masses = [row(target, text[:n])[text[n]] for n in range(length)]
        seen = sum(
            mass * np.prod(masses[len(e) :]) for e, mass in law.items() if e == text[: len(e)]
        )
        distance += abs(seen - np.prod(masses))
    return float(distance) / 2
