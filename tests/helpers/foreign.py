"""Verifiers as other projects write them, in NumPy and loops. A `fault` is one wrong line."""

import bisect
import functools
import itertools

import numpy as np


class Coins:
    """Uniforms by name: explicit ones by their place, others drawn when they are first asked for."""

    def __init__(self, source, size):
        self.source, self.size, self.drawn = source, size, {}
        if isinstance(source, int):
            self.source = np.random.default_rng(source)
        elif type(source).__module__.startswith("torch"):
            import torch

            values = torch.rand(size, generator=source).tolist()
            self.source = np.array(values)

    def __call__(self, place):
        if isinstance(self.source, np.ndarray):
            return float(self.source[place])
        if place not in self.drawn:
            self.drawn[place] = self.source.random()
        return self.drawn[place]


def pick(u, weights):
    weights = np.asarray(weights, np.float64).tolist()
    running = list(itertools.accumulate(weights))
    place = min(bisect.bisect_right(running, u * running[-1]), len(weights) - 1)
    while place > 0 and weights[place] <= 0:
        place -= 1
    return place


def one_hot(x, size):
    return np.where(np.arange(size) == x, 1.0, 0.0)


def replacement_row(p, q, x, fault):
    if fault == "residual p":
        return p
    if fault == "residual p without x":
        row = np.array(p)
        row[x] = 0
        return row
    if fault == "residual |p - q|":
        return np.abs(p - q)
    if fault == "residual argmax":
        return one_hot(np.argmax(np.maximum(p - q, 0)), len(p))
    row = np.maximum(p - q, 0)
    if fault == "residual epsilon":
        row = row / row.sum() + 1e-3
    return row if row.sum() > 0 else p


def token(draft_tokens, draft_rows, target_rows, source, *, fault="", bonus=True):
    length = len(draft_tokens)
    coin = Coins(source, length + 1)
    target, draft = np.asarray(target_rows, np.float64), np.asarray(draft_rows, np.float64)
    if fault == "in place":
        target_rows[0] *= 2
    emitted = []
    for i in range(length):
        x = int(draft_tokens[i])
        p, q = target[i], draft[i]
        if fault == "row before":
            p = target[max(i - 1, 0)]
        if fault == "row after":
            p = target[i + 1]
        if fault == "third by second":
            p = target[min(i, 1)]
        if fault == "hotter q":
            q = q**0.5 / (q**0.5).sum()
        if fault == "certain":
            q = one_hot(x, len(q))
        if fault == "target cut again":
            p = np.where(p >= 0.06, p, 0)
            p = p / p.sum()
        ratio = p[x] / q[x] if q[x] > 0 else 1.0
        if fault == "lenience":
            ratio /= 0.8
        if fault == "floor":
            ratio = p[x] / max(q[x], 1e-1)
        if fault == "always":
            ratio = 1.0
        if fault == "never":
            ratio = 0.0
        if fault == "greedy":
            ratio = float(x == np.argmax(p))
        u = coin(0 if fault == "one coin" else i)
        if u < ratio or (fault == "<=" and u <= ratio):
            emitted.append(x)
            continue
        last = coin(i if fault == "reused" else length)
        if fault == "greedy":
            return [*emitted, int(np.argmax(p))]
        return [*emitted, pick(last, replacement_row(p, q, x, fault))]
    if bonus and fault != "no bonus":
        row = target[length]
        if fault == "bonus q":
            row = draft[-1]
        if fault == "bonus row before":
            row = target[length - 1]
        emitted.append(pick(coin(length), row))
    if fault == "extra bonus":
        emitted.append(pick(coin(length), target[length]))
    return emitted


def block(draft_tokens, draft_rows, target_rows, source, *, fault=""):
    length = len(draft_tokens)
    coin = Coins(source, length + 1)
    p, q = np.asarray(target_rows, np.float64), np.asarray(draft_rows, np.float64)
    weights = [1.0]
    for i, x in enumerate(draft_tokens):
        weight = weights[-1] * p[i][x] / q[i][x]
        weights.append(weight if fault == "uncapped" else min(1.0, weight))
    kept = 0
    for i in range(1, length + 1):
        chance = weights[i]
        if i < length and fault != "own weight":
            above = np.maximum(weights[i] * p[i] - q[i], 0).sum()
            below = np.maximum(q[i] - weights[i] * p[i], 0).sum()
            chance = above / below if below > 0 else 1.0
        if coin(i - 1) < chance:
            kept = i
        elif fault == "first failure":
            break
    row = p[kept]
    if kept < length:
        weight = 1.0 if fault == "token residual" else weights[kept]
        row = np.maximum(weight * p[kept] - q[kept], 0)
        row = row if row.sum() > 0 else p[kept]
    return np.array([*draft_tokens[:kept], pick(coin(length), row)])


def point_mass(draft_tokens, draft_rows, target_rows, source, *, fault=""):
    assert draft_rows is None
    coin = Coins(source, len(draft_tokens) + 1)
    for i, x in enumerate(draft_tokens):
        if not coin(i) < target_rows[i][x]:
            row = np.array(target_rows[i], np.float64)
            if fault != "kept":
                row[x] = 0
            return [*draft_tokens[:i].tolist(), pick(coin(len(draft_tokens)), row)]
    return [*draft_tokens.tolist(), pick(coin(len(draft_tokens)), target_rows[-1])]


def tree(tokens, parents, draft_rows, target_rows, source, *, how="without", fault=""):
    """Verify from the root on; `how` is "point", "with" or "without" replacement."""
    coin = Coins(source, len(tokens))
    node, emitted, slots = 0, [], []
    while True:
        left = np.asarray(target_rows[node], np.float64)
        draft = None if how == "point" else np.asarray(draft_rows[node], np.float64)
        children = [n for n in range(len(tokens)) if parents[n] == node]
        if fault == "sorted" and draft is not None:
            children.sort(key=lambda n: -draft[tokens[n]])
        if fault == "reversed":
            children.reverse()
        seen = set()
        for child in children:
            x = int(tokens[child])
            if fault == "skip duplicates" and x in seen:
                continue
            seen.add(x)
            share = one_hot(x, len(left)) if how == "point" else draft
            if coin(child - 1) * share[x] < left[x]:
                break
            if fault == "kept":
                continue
            if fault == "zeroed":
                left[x] = 0
            else:
                left = np.maximum(left - share, 0)
            if fault != "unnormalised":
                left = left / left.sum()
            if how == "without" and fault != "with":
                draft[x] = 0
                if fault != "q unnormalised":
                    draft = draft / draft.sum()
        else:
            emitted.append(pick(coin(len(tokens) - 1), left))
            if fault == "slots":
                slots = list(range(1, len(slots) + 1))
            return (emitted, slots)
        node = child
        emitted.append(int(tokens[child]))
        slots.append(child)


TREES = {"point_mass": "point", "with_replacement": "with", "without_replacement": "without"}
"""How `tree` verifies candidates of each kind."""


def variant(function, fault, **more):
    return functools.partial(function, fault=fault, **more)


def batch_of(verify):
    def in_batch(tokens, draft_rows, target_rows, sources):
        return [
            verify(*args) for args in zip(tokens, draft_rows, target_rows, sources, strict=True)
        ]

    return in_batch
