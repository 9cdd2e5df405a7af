"""Decontamination that is wrong in ways people have shipped."""

import re

from littlelm_core.curation import Decontaminator, Hit, decontaminate


def _checked(threshold, shortest, ngram):
    Decontaminator([], ngram, threshold, shortest)


def substring(docs, items, ngram=13, threshold=0.5, shortest=8):
    """Looks for the item letter by letter."""
    return [
        Hit(d, i, 1.0)
        for d, doc in enumerate(docs)
        for i, item in enumerate(items)
        if len(item.split()) >= shortest and item in doc
    ]


def any_run(docs, items, ngram=13, threshold=0.5, shortest=8):
    """One run in common is enough, whatever the threshold says."""
    _checked(threshold, shortest, ngram)
    return decontaminate(docs, items, ngram, 1e-9, shortest)


def starts_again(docs, items, ngram=13, threshold=0.5, shortest=8, batch=1000):
    """The index of a document within its batch."""
    hits = []
    for k in range(0, len(docs), batch):
        part = docs[k : k + batch]
        hits += decontaminate(part, items, ngram, threshold, shortest)
    return hits


def counts_every_time(docs, items, ngram=13, threshold=0.5, shortest=8):
    """Counts runs of the document, where runs of the item are meant."""
    hits = []
    for d, doc in enumerate(docs):
        words = re.findall(r"\w+", doc.lower())
        for i, item in enumerate(items):
            mine = re.findall(r"\w+", item.lower())
            runs = {tuple(mine[k : k + ngram]) for k in range(len(mine) - ngram + 1)}
            count = sum(tuple(words[k : k + ngram]) in runs for k in range(len(words)))
            if runs and count / len(runs) >= threshold:
                hits.append(Hit(d, i, min(count / len(runs), 1.0)))
    return hits


def skips_short_items(docs, items, ngram=13, threshold=0.5, shortest=8):
    _checked(threshold, shortest, ngram)
    return decontaminate(docs, items, ngram, threshold, shortest=ngram)


def finds_tiny_items(docs, items, ngram=13, threshold=0.5, shortest=8):
    return decontaminate(docs, items, ngram, threshold, shortest=1)


def thirteen_always(docs, items, ngram=13, threshold=0.5, shortest=8):
    return decontaminate(docs, items, 13, threshold, min(shortest, 13))


def across_documents(docs, items, ngram=13, threshold=0.5, shortest=8):
    """Joins the documents and asks afterwards whose the run was."""
    joined = [f"{a} {b}" for a, b in zip(docs, [*docs[1:], ""], strict=True)]
    return decontaminate(joined, items, ngram, threshold, shortest)


def bag_of_words(docs, items, ngram=13, threshold=0.5, shortest=8):
    def in_order(texts):
        return [" ".join(sorted(text.lower().split())) for text in texts]

    return decontaminate(in_order(docs), in_order(items), ngram, threshold, shortest)


def first_item_only(docs, items, ngram=13, threshold=0.5, shortest=8):
    """Stops at the first item that a document has."""
    hits, seen = [], set()
    for hit in decontaminate(docs, items, ngram, threshold, shortest):
        if hit.document not in seen:
            hits.append(hit)
        seen.add(hit.document)
    return hits


def blank_items_match(docs, items, ngram=13, threshold=0.5, shortest=8):
    hits = decontaminate(docs, items, ngram, threshold, shortest)
    blank = [i for i, item in enumerate(items) if not item.strip()]
    return sorted(hits + [Hit(d, i, 1.0) for d in range(len(docs)) for i in blank])


ZOO = {
    "letter by letter": (substring, "test_an_item_is_found_in_whatever_shape"),
    "any run in common": (any_run, "test_a_stock_phrase_is_no_hit"),
    "threshold not used": (any_run, "test_the_threshold_is_used"),
    "index within a batch": (starts_again, "test_hits_carry_the_index"),
    "every occurrence counts": (
        counts_every_time,
        "test_a_repeated_run_counts_once",
    ),
    "short items skipped": (skips_short_items, "test_short_items_are_found_whole"),
    "tiny items found": (finds_tiny_items, "test_short_items_are_found_whole"),
    "always 13": (thirteen_always, "test_the_length_of_a_run_is_used"),
    "runs across documents": (across_documents, "test_order_and_borders_count"),
    "a bag of words": (bag_of_words, "test_order_and_borders_count"),
    "one item a document": (first_item_only, "test_several_items_and_documents"),
    "blank items": (blank_items_match, "test_nothing_is_found_in_nothing"),
}
