"""Every published way to get token, block, sibling or point-mass verification wrong.

Each variant is a plain rule with one line replaced, played where the fault shows, with the exact
total variation that it must have there. What is published wrong is known from issue trackers and
papers; the figures are exact fractions, worked out by enumeration.
"""

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp

import jaxspec as js
from helpers.plain_rules import (
    PLAIN_RULES,
    Block,
    Now,
    Walk,
    certain,
    inverse_cdf,
    normalise,
    not_drawn_yet,
    relu,
    verdict,
)
from jaxspec import audit
from jaxspec.audit.boxes import UNITS


def one_sample_per_leaf(
    draws: js.Draws, proposal: js.Proposal, target_rows: jax.Array, bonus: jax.Array
) -> js.Verdict:
    """Ask the target once for each leaf of a tree of one level and keep the longest match.

    Without a match the first leaf's sample is emitted.
    """
    tree = proposal.tree
    children = tree.children[0]
    samples = jax.vmap(inverse_cdf, in_axes=(0, None))(draws.accept[children], target_rows[0])
    is_match = samples == tree.tokens[children]
    node = children[jnp.argmax(is_match)]
    path = jnp.stack([jnp.int32(0), jnp.where(jnp.any(is_match), node, -1)])
    after = inverse_cdf(draws.final[1], target_rows[node])
    last = jnp.where(jnp.any(is_match), after, samples[0])
    return verdict(tree, path, last, ~jnp.any(is_match) | bonus)


def draw_greedily(pairs: jax.Array, row: jax.Array) -> jax.Array:
    """Take the most probable tokens, regardless of the draws."""
    return jax.lax.top_k(row, pairs.shape[0])[1]


def draw_colder(pairs: jax.Array, row: jax.Array) -> jax.Array:
    """Draw at temperature 1/2 what is recorded at temperature 1."""
    return js.WithReplacement.draw(pairs, normalise(row**2))


def draw_and_sort(pairs: jax.Array, row: jax.Array) -> jax.Array:
    """Draw as one should, then put the candidates of greatest score first."""
    tokens = js.WithReplacement.draw(pairs, row)
    return tokens[jax.lax.top_k(row[tokens], tokens.shape[0])[1]]


def without_the_first_improbable(tokens: jax.Array, rows: jax.Array) -> jax.Array:
    """Trim a draft at its first token of low probability: the token is looked at and dropped."""
    return jnp.argmax(jnp.append(rows[jnp.arange(len(tokens)), tokens] < 0.18, True))


@dataclasses.dataclass(frozen=True)
class Variant:
    """A rule with one line wrong, and where that shows.

    Attributes:
      name: what is wrong.
      rule: the rule it claims to be.
      instance: where the fault shows.
      verify: the faulty verifier.
      draw: the faulty draft, instead of the proposal's.
      num_drafted: the faulty length of the draft, decided by looking at its tokens.
      tv: how far its law must be off there, exactly.
      impossible: mass of rounds that must emit what the target cannot, exactly.
    """

    name: str
    rule: js.Rule
    instance: audit.Instance
    verify: Callable[..., js.Verdict] | None = None
    draw: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    num_drafted: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    _: dataclasses.KW_ONLY
    tv: Fraction
    impossible: Fraction = Fraction(0)


def row(*numerators: int) -> list[Fraction]:
    return [Fraction(n, sum(numerators)) for n in numerators]


def _one_level(
    name: str,
    p: Sequence[Fraction],
    q: Sequence[Fraction] | None = None,
    width: int = 1,
    candidates: Sequence[int] = (),
) -> audit.Instance:
    """Draw `width` siblings from q, or name the candidates; every context has the same rows."""
    return audit.Instance(
        name=name,
        target={(): p},
        draft={(): q} if q else None,
        branching=(width,) if q else (),
        candidates=None if q else {(): candidates},
    )


KILL_P, KILL_Q = row(1, 3, 7, 9), row(12, 3, 4, 1)
KILL_PATH = _one_level("kill row", KILL_P, KILL_Q)
KILL_SIBLINGS = _one_level("kill row, two siblings", KILL_P, KILL_Q, width=2)
KILL_CANDIDATES = _one_level("kill row, two candidates", KILL_P, candidates=(1, 2))
"""One row pair that shows every fault of one level, by a total variation of at least 21 / 400."""

ZERO_P, ZERO_Q = row(0, 1, 3), row(2, 1, 1)
ZERO_PATH = _one_level("zero", ZERO_P, ZERO_Q)
ZERO_SIBLINGS = _one_level("zero, two siblings", ZERO_P, ZERO_Q, width=2)
ZERO_CANDIDATES = _one_level("zero, two candidates", ZERO_P, candidates=(0, 1))
"""Token 0 cannot occur: where a draw of exactly 0 accepts it, a mass of 2^-24 shows."""

TRIMMED_PATH = _one_level("even target, uneven draft", row(1, 1), row(9, 1))
"""Dropping token 1 whenever it is drafted gives the first token the law (11 / 20, 9 / 20)."""

THRESHOLDS = _one_level("thresholds", row(10, 6, 3, 1), candidates=(1, 2))

CONTEXTS = next(
    instance
    for instance in audit.instances_for(js.RULES["block"])
    if instance.name == "contexts of three tokens"
)
"""A path of two, rows by context: V = 3, since the residual of a binary row hides its faults."""

TOKEN, BLOCK, POINT_MASS, WITH, WITHOUT = (js.RULES[name] for name in PLAIN_RULES)
UNIT = Fraction(1, UNITS)


def _remove_x(now: Now) -> jax.Array:
    return normalise(jnp.where(now.is_x, 0.0, now.r))


def _at_most(now: Now) -> jax.Array:
    return now.u * now.s[now.x] <= now.r[now.x]


def _threshold(accept_all: float, accept_one: float) -> Walk:
    """Accept by one coin against thresholds below 1, as SGLang's target-only sampling can."""

    def accepts(now: Now) -> jax.Array:
        listed = jnp.where(now.gone | now.is_x, now.p, 0.0).sum()
        return (now.u * accept_all < listed) | (now.p[now.x] >= accept_one)

    return Walk(share=certain, shares_coin=True, accepts=accepts)


TOKEN_VARIANTS = (
    Variant("residual = p", TOKEN, KILL_PATH, Walk(reject=lambda now: now.p), tv=Fraction(61, 400)),
    Variant(
        "residual = p without x", TOKEN, KILL_PATH, Walk(reject=_remove_x), tv=Fraction(53, 380)
    ),
    Variant(
        "residual = |p - q|",
        TOKEN,
        KILL_PATH,
        Walk(reject=lambda now: normalise(jnp.abs(now.r - now.s))),
        tv=Fraction(11, 40),
    ),
    Variant("argmax draft with softmax q", TOKEN, KILL_PATH, draw=draw_greedily, tv=Fraction(1, 4)),
    Variant(
        "draft colder than its recorded q", TOKEN, KILL_PATH, draw=draw_colder, tv=Fraction(12, 85)
    ),
    Variant(
        "u reused for the residual", TOKEN, KILL_PATH, Walk(final_is_coin=True), tv=Fraction(2, 55)
    ),
    Variant("bonus from q", TOKEN, KILL_PATH, Walk(bonus_row=lambda p, q: q), tv=Fraction(99, 400)),
    Variant(
        "<= instead of <",
        TOKEN,
        ZERO_PATH,
        Walk(accepts=_at_most),
        impossible=UNIT / 2,
        tv=UNIT / 2,
    ),
    # The bias is at most V times the epsilon: at the usual 1e-9 no law in float32 can show it.
    Variant(
        "epsilon in the quotient",
        TOKEN,
        KILL_PATH,
        Walk(accepts=lambda now: now.u < now.p[now.x] / (now.q[now.x] + 1e-3)),
        tv=Fraction(977, 907510),
    ),
    Variant(
        "epsilon in the residual",
        TOKEN,
        ZERO_PATH,
        Walk(reject=lambda now: normalise(relu(now.r - now.s) + 1e-3)),
        impossible=Fraction(1, 1006),
        tv=Fraction(1, 503),
    ),
    Variant(
        "a drafted token dropped for its low q",
        TOKEN,
        KILL_PATH,
        Walk(is_tested=lambda now: now.q[now.x] > 0.1),
        tv=Fraction(11, 400),
    ),
    Variant(
        "the last sampled token dropped for its low q",
        TOKEN,
        TRIMMED_PATH,
        num_drafted=without_the_first_improbable,
        tv=Fraction(1, 20),
    ),
    Variant(
        "lenience 1/2",
        TOKEN,
        _one_level("half a swap", row(5, 3, 2), row(2, 3, 5)),
        Walk(accepts=lambda now: now.u * 0.5 * now.q[now.x] < now.p[now.x]),
        tv=Fraction(1, 5),
    ),
)

BLOCK_VARIANTS = (
    Variant("h = a", BLOCK, CONTEXTS, Block(inner=lambda prefix: prefix.a), tv=Fraction(17, 144)),
    Variant(
        "h = p_i, the token ratio",
        BLOCK,
        CONTEXTS,
        Block(inner=lambda prefix: prefix.rho, whole=lambda prefix: prefix.rho),
        tv=Fraction(19, 72),
    ),
    Variant(
        "last uncapped",
        BLOCK,
        CONTEXTS,
        Block(whole=lambda prefix: prefix.product),
        tv=Fraction(1, 24),
    ),
    Variant(
        "stop at first failure",
        dataclasses.replace(BLOCK, tests_deepest_first=False),
        CONTEXTS,
        Block(stops_at_first_failure=True),
        tv=Fraction(1, 5),
    ),
    Variant(
        "token residual",
        BLOCK,
        CONTEXTS,
        Block(residual=lambda prefix: relu(prefix.p - prefix.q)),
        tv=Fraction(1, 72),
    ),
    Variant(
        "the last sampled token dropped for its low q",
        BLOCK,
        TRIMMED_PATH,
        num_drafted=without_the_first_improbable,
        tv=Fraction(1, 20),
    ),
    Variant(
        "<= instead of <",
        BLOCK,
        ZERO_PATH,
        Block(passes=lambda u, h: u <= h),
        impossible=UNIT / 2,
        tv=UNIT / 2,
    ),
)

SIBLING_VARIANTS = (
    Variant("sort siblings by score", WITH, KILL_SIBLINGS, draw=draw_and_sort, tv=Fraction(9, 80)),
    Variant(
        "prune by identity",
        WITH,
        KILL_SIBLINGS,
        Walk(is_tested=lambda now: now.q[now.x] > 0.18),
        tv=Fraction(18, 125),
    ),
    Variant(
        "the last sibling dropped for its low q",
        WITHOUT,
        KILL_SIBLINGS,
        num_drafted=lambda tokens, rows: jnp.where(rows[0, tokens[1]] < 0.18, 1, 2),
        tv=Fraction(3, 40),
    ),
    Variant(
        "skip duplicates",
        WITH,
        KILL_SIBLINGS,
        Walk(is_tested=lambda now: ~now.gone[now.x]),
        tv=Fraction(29, 500),
    ),
    Variant(
        "zero the token instead of subtracting q",
        WITH,
        KILL_SIBLINGS,
        Walk(reject=_remove_x),
        tv=Fraction(1643, 7600),
    ),
    Variant(
        "without replacement with un-renormalised q",
        WITHOUT,
        KILL_SIBLINGS,
        Walk(share=lambda now: jnp.where(now.gone, 0.0, now.q)),
        tv=Fraction(29, 200),
    ),
    Variant(
        "<= instead of <, with replacement",
        WITH,
        ZERO_SIBLINGS,
        Walk(accepts=_at_most),
        impossible=UNIT * Fraction(3, 4),
        tv=UNIT,
    ),
    Variant(
        "<= instead of <, without replacement",
        WITHOUT,
        ZERO_SIBLINGS,
        Walk(share=not_drawn_yet, accepts=_at_most),
        impossible=UNIT / 2,
        tv=UNIT,
    ),
)

POINT_MASS_VARIANTS = (
    Variant(
        "no renormalisation",
        POINT_MASS,
        KILL_CANDIDATES,
        Walk(share=certain, reject=lambda now: jnp.where(now.is_x, 0.0, now.r)),
        tv=Fraction(21, 400),
    ),
    Variant(
        "keep the mass",
        POINT_MASS,
        KILL_CANDIDATES,
        Walk(share=certain, reject=lambda now: now.p),
        tv=Fraction(179, 800),
    ),
    Variant(
        "accept min(1, p / softmax q)",
        WITHOUT,
        KILL_SIBLINGS,
        Walk(reject=_remove_x),
        draw=draw_greedily,
        tv=Fraction(3, 5),
    ),
    Variant(
        "u reused across siblings",
        POINT_MASS,
        KILL_CANDIDATES,
        Walk(share=certain, shares_coin=True),
        tv=Fraction(3, 34),
    ),
    Variant(
        "<= instead of <",
        POINT_MASS,
        ZERO_CANDIDATES,
        Walk(share=certain, accepts=_at_most),
        impossible=UNIT,
        tv=UNIT,
    ),
    Variant(
        "one sample per leaf, longest match",
        POINT_MASS,
        _one_level("two leaves", row(2, 5, 3), candidates=(1, 2)),
        one_sample_per_leaf,
        tv=Fraction(3, 50),
    ),
    Variant(
        "threshold 0.9 for all candidates",
        POINT_MASS,
        THRESHOLDS,
        _threshold(accept_all=0.9, accept_one=2.0),
        tv=Fraction(1, 20),
    ),
    Variant(
        "threshold 1/4 for one candidate",
        POINT_MASS,
        THRESHOLDS,
        _threshold(accept_all=1.0, accept_one=0.25),
        tv=Fraction(7, 10),
    ),
)

VARIANTS = {
    "token": TOKEN_VARIANTS,
    "block": BLOCK_VARIANTS,
    "siblings": SIBLING_VARIANTS,
    "point mass": POINT_MASS_VARIANTS,
}
"""All of them by family."""
