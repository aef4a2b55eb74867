"""Verification rules written plainly, to be broken one line at a time.

A walk from the root down and a block rule, which share no code with the verifiers of the package.
Each holds the lines that people get wrong as fields, so that a faulty variant is the same rule with
one line replaced. They read all rows and skip no work; they are made to be read.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxspec as js


def relu(row: jax.Array) -> jax.Array:
    return jnp.maximum(row, 0.0)


def normalise(row: jax.Array) -> jax.Array:
    """Divide by the sum; a row without mass stays as it is."""
    total = row.sum()
    return row / jnp.where(total > 0, total, 1.0)


def inverse_cdf(u: jax.Array, row: jax.Array) -> jax.Array:
    running = jnp.cumsum(row)
    index = jnp.sum(running <= u * running[-1], dtype=jnp.int32)
    return jnp.minimum(index, row.shape[0] - 1)


def verdict(tree: js.Tree, path: jax.Array, last: jax.Array, is_emitted: jax.Array) -> js.Verdict:
    """Write down an accepted path, int32 [D + 1] ending in -1, and the token after it."""
    depth = jnp.sum(path >= 0, dtype=jnp.int32) - 1
    accepted = jnp.where(path >= 0, tree.tokens[path], -1)
    tokens = jnp.append(accepted[1:], -1)
    return js.Verdict(
        tokens=jnp.where((jnp.arange(tokens.shape[0]) == depth) & is_emitted, last, tokens),
        num_tokens=jnp.where(is_emitted, depth + 1, depth),
        num_accepted=depth,
        path=path,
        stop_node=path[depth],
        status=jnp.int32(0),
    )


@dataclasses.dataclass(frozen=True)
class Now:
    """What can be seen while one candidate is tested.

    Attributes:
      p: the target row of its parent.
      q: the draft row of its parent (for point masses, which have none, the target row).
      r: the residual of p after earlier siblings.
      x: its token.
      u: its accept draw.
      gone: bool [V], tokens of earlier siblings.
      s: the row that this candidate was drawn from.
    """

    p: jax.Array
    q: jax.Array
    r: jax.Array
    x: jax.Array
    u: jax.Array
    gone: jax.Array
    s: jax.Array | None = None

    @property
    def is_x(self) -> jax.Array:
        return jnp.arange(self.p.shape[0]) == self.x


def certain(now: Now) -> jax.Array:
    """Point masses: the candidate was not drawn at all."""
    return jnp.where(now.is_x, 1.0, 0.0)


def not_drawn_yet(now: Now) -> jax.Array:
    """Without replacement: the draft row without earlier siblings, uniform once it is exhausted."""
    rest = jnp.where(now.gone, 0.0, now.q)
    return normalise(jnp.where(rest.sum() > 0, rest, jnp.where(now.gone, 0.0, 1.0)))


@dataclasses.dataclass(frozen=True)
class Walk:
    """From the root down, siblings in order; by default the rule for draws with replacement."""

    share: Callable[[Now], jax.Array] = lambda now: now.q
    is_tested: Callable[[Now], jax.Array] = lambda now: jnp.bool_(True)
    accepts: Callable[[Now], jax.Array] = lambda now: now.u * now.s[now.x] < now.r[now.x]
    reject: Callable[[Now], jax.Array] = lambda now: normalise(relu(now.r - now.s))
    bonus_row: Callable[[jax.Array, jax.Array], jax.Array] = lambda p, q: p
    shares_coin: bool = False  # the first sibling's accept draw serves all its siblings
    final_is_coin: bool = False  # the accept draw of the last rejection also draws the replacement

    def __call__(
        self, draws: js.Draws, proposal: js.Proposal, target_rows: jax.Array, bonus: jax.Array
    ) -> js.Verdict:
        tree = proposal.tree
        draft_rows = target_rows if proposal.draft_rows is None else proposal.draft_rows
        path = [jnp.int32(0)]
        node, r, coin = jnp.int32(0), target_rows[0], draws.final[1]
        for depth in range(tree.max_depth):
            here = path[depth]
            gone = jnp.zeros(r.shape, bool)
            for child in tree.children[here]:
                u = draws.accept[tree.children[here, 0] if self.shares_coin else child]
                p, q, x = target_rows[here], draft_rows[here], tree.tokens[child]
                now = Now(p=p, q=q, r=r, x=x, u=u, gone=gone)
                now = dataclasses.replace(now, s=self.share(now))
                is_tested = (node == here) & (child >= 0) & self.is_tested(now)
                is_accepted = is_tested & self.accepts(now)
                left = jnp.where(is_tested, self.reject(now), r)
                r = jnp.where(is_accepted, target_rows[child], left)
                node = jnp.where(is_accepted, child, node)
                coin = jnp.where(is_accepted, draws.final[1], jnp.where(is_tested, u, coin))
                gone |= is_tested & now.is_x
            is_deeper = (here >= 0) & (node != here)
            path.append(jnp.where(is_deeper, node, -1))
        is_inner = tree.children[node, 0] >= 0
        is_end = ~is_inner & (node > 0)
        row = jnp.where(is_end, self.bonus_row(r, draft_rows[node]), r)
        last = inverse_cdf(coin if self.final_is_coin else draws.final[1], row)
        return verdict(tree, jnp.stack(path), last, ~is_end | bonus)


@js.struct
class Prefix:
    """What can be seen of a drafted prefix of a path.

    Attributes:
      a: its weight, min(1, weight of the prefix before it times rho).
      product: the plain product of all rho up to here, capped nowhere.
      rho: p(x) / q(x) of its last token.
      p: the target row after it.
      q: the draft row after it.
    """

    a: jax.Array
    product: jax.Array
    rho: jax.Array
    p: jax.Array
    q: jax.Array


def z_over_d(prefix: Prefix) -> jax.Array:
    """The probability that an inner prefix is kept; 0 / 0 is 1."""
    z = relu(prefix.a * prefix.p - prefix.q).sum()
    d = relu(prefix.q - prefix.a * prefix.p).sum()
    return jnp.where(d > 0, z / jnp.where(d > 0, d, 1.0), 1.0)


@dataclasses.dataclass(frozen=True)
class Block:
    """Block verification of a single path: the longest prefix that passes is kept."""

    inner: Callable[[Prefix], jax.Array] = z_over_d
    whole: Callable[[Prefix], jax.Array] = lambda prefix: prefix.a
    passes: Callable[[jax.Array, jax.Array], jax.Array] = lambda u, h: u < h
    residual: Callable[[Prefix], jax.Array] = lambda prefix: relu(prefix.a * prefix.p - prefix.q)
    stops_at_first_failure: bool = False
    capped_to: int = 99  # tokens up to which the weight is at most 1

    def __call__(
        self, draws: js.Draws, proposal: js.Proposal, target_rows: jax.Array, bonus: jax.Array
    ) -> js.Verdict:
        tree, draft_rows = proposal.tree, proposal.draft_rows
        length = tree.num_nodes - 1
        one = jnp.float32(1)
        prefix = Prefix(a=one, product=one, rho=one, p=target_rows[0], q=draft_rows[0])
        kept, kept_length, is_unbroken = prefix, jnp.int32(0), jnp.bool_(True)
        for i in range(1, tree.max_depth + 1):
            x = tree.tokens[i]
            rho = prefix.p[x] / jnp.where(i <= length, prefix.q[x], 1.0)
            prefix = Prefix(
                a=jnp.minimum(prefix.a * rho, 1.0 if i <= self.capped_to else jnp.inf),
                product=prefix.product * rho,
                rho=rho,
                p=target_rows[i],
                q=draft_rows[i],
            )
            h = jnp.where(i == length, self.whole(prefix), self.inner(prefix))
            is_kept = (i <= length) & self.passes(draws.accept[i], h)
            is_unbroken &= is_kept
            is_kept = is_unbroken if self.stops_at_first_failure else is_kept
            kept, kept_length = jax.tree.map(
                functools.partial(jnp.where, is_kept), (prefix, jnp.int32(i)), (kept, kept_length)
            )
        is_whole = kept_length == length
        residual = self.residual(kept)
        row = jnp.where(is_whole | (residual.sum() == 0), kept.p, residual)
        nodes = jnp.arange(tree.max_nodes, dtype=jnp.int32)
        path = jnp.where(nodes <= kept_length, nodes, -1)
        last = inverse_cdf(draws.final[1], row)
        return verdict(tree, path, last, ~is_whole | bonus)


PLAIN_RULES = {
    "token": Walk(),
    "block": Block(),
    "point_mass": Walk(share=certain),
    "with_replacement": Walk(),
    "without_replacement": Walk(share=not_drawn_yet),
}
"""The rules without a fault, by name."""
