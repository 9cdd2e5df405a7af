"""Deduplication that is wrong in ways people have shipped."""

import dataclasses

from littlelm_core.curation import MinHash, deduplicate


def report_of(docs, clusters):
    """A report that fits these clusters, with the kept indices."""
    clusters = {min(group): sorted(group) for group in clusters if len(group) > 1}
    gone = {i for low, group in clusters.items() for i in group if i != low}
    kept = [i for i in range(len(docs)) if i not in gone]
    _, empty = deduplicate([])
    return kept, dataclasses.replace(
        empty, documents=len(docs), kept=len(kept), near=len(gone), clusters=clusters
    )


def grouped(docs, threshold, minhash=None):
    _, report = deduplicate(docs, threshold, minhash)
    return list(report.clusters.values())


class Lenient(MinHash):
    """Every candidate looks the same: nothing is verified."""

    def shingle_sets(self, texts):
        return [super(Lenient, self).shingle_sets(["same"])[0] for _ in texts]


def trusts_candidates(docs, threshold=0.8):
    return deduplicate(docs, threshold, Lenient())


def ignores_the_threshold(docs, threshold=0.8):
    if not 0 < threshold <= 1:
        raise ValueError("threshold")
    return deduplicate(docs, 0.8)


def above_the_threshold(docs, threshold=0.8):
    return deduplicate(docs, threshold + 1e-9 if 0 < threshold < 1 else threshold)


def keeps_the_last(docs, threshold=0.8):
    _, report = deduplicate(docs, threshold)
    report.clusters = {max(group): group for group in report.clusters.values()}
    gone = {i for group in report.clusters.values() for i in group}
    return sorted(set(range(len(docs))) - gone | set(report.clusters)), report


def drops_all_of_a_cluster(docs, threshold=0.8):
    kept, report = deduplicate(docs, threshold)
    return [i for i in kept if i not in report.clusters], report


def only_equal(docs, threshold=0.8):
    groups = {}
    for i, text in enumerate(docs):
        groups.setdefault(text, []).append(i)
    return report_of(docs, groups.values())


def compares_with_the_first(docs, threshold=0.8):
    """A document joins the first of a cluster, or nobody: chains fall apart."""
    clusters, minhash = [], MinHash()
    sets = minhash.shingle_sets(docs)
    for i in range(len(docs)):
        for group in clusters:
            a, b = set(sets[group[0]].tolist()), set(sets[i].tolist())
            if len(a & b) / len(a | b) >= threshold:
                group.append(i)
                break
        else:
            clusters.append([i])
    return report_of(docs, clusters)


class OnlyLetters(MinHash):
    """A text shorter than a shingle has none, and all such texts are the same."""

    def shingles(self, texts):
        return super().shingles(
            ["" if len(text.split()) < self.shingle else text for text in texts]
        )


def merges_short_texts(docs, threshold=0.8):
    return deduplicate(docs, threshold, OnlyLetters())


def containment(docs, threshold=0.8):
    """Shared words over the shorter text: a footer makes duplicates."""
    kept, _ = deduplicate(docs, threshold)
    groups = grouped(docs, threshold)
    foot = {}
    for i in kept:
        foot.setdefault(" ".join(docs[i].split()[-20:]), []).append(i)
    joined = {i: set(group) for group in groups for i in group}
    for same in foot.values():
        every = set().union(*(joined.get(i, {i}) for i in same))
        for i in every:
            joined[i] = every
    return report_of(docs, {frozenset(group) for group in joined.values()})


def pairs_at_most(docs, threshold=0.8):
    """Takes one twin out and looks no further."""
    return report_of(docs, [group[:2] for group in grouped(docs, threshold)])


def in_place(docs, threshold=0.8):
    kept, report = deduplicate(docs, threshold)
    if isinstance(docs, list):
        docs[:] = [docs[i] for i in kept]
    return kept, report


ZOO = {
    "candidates are trusted": (trusts_candidates, "test_candidates_are_verified"),
    "threshold ignored": (ignores_the_threshold, "test_the_threshold_is_used"),
    "above, not at": (above_the_threshold, "test_the_threshold_is_used"),
    "the last is kept": (keeps_the_last, "test_equal_texts_keep_the_first"),
    "the whole cluster goes": (
        drops_all_of_a_cluster,
        "test_equal_texts_keep_the_first",
    ),
    "equal texts only": (only_equal, "test_near_duplicates_go"),
    "equal letter for letter": (
        only_equal,
        "test_rewrapped_and_recased_is_a_duplicate",
    ),
    "chains fall apart": (
        compares_with_the_first,
        "test_a_cluster_is_what_pairs_connect",
    ),
    "the order decides": (
        compares_with_the_first,
        "test_the_order_changes_only_who_is_first",
    ),
    "short texts are one": (
        merges_short_texts,
        "test_different_short_documents_stay",
    ),
    "a footer is enough": (containment, "test_a_shared_footer_is_no_duplicate"),
    "two of many": (pairs_at_most, "test_many_copies"),
    "the list is emptied": (in_place, "test_the_list_is_left_alone"),
}
