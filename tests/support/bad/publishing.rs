//! Seeds of what publishing reads from strangers: policies, listings, pipelines.

/// Texts of policies.
pub const POLICIES: [(&str, &str); 9] = [
    ("empty", "{}"),
    (
        "all-keys",
        r#"{"verify": {"weights": true, "devices": ["cpu", "reference"], "min_devices": 2, "min_references": 1,
 "max_near_tie_share": 0.05, "max_abs_logprob_diff": 1e-4, "min_source_agreement": 0.9, "min_mtp_acceptance": 0},
 "score": {"min_tasks": 1, "min_texts": 1, "min_questions": 500, "min_tokens": 1000, "max_accuracy_drop": 0.01,
 "max_perplexity_increase": 0.03, "max_kl_mean": null, "min_top1_agreement": 1, "conclusive": true, "allow_excluded": false},
 "card": {"base_model": "org/name", "license": true, "notes": "A *note*."}}"#,
    ),
    ("lists", r#"{"verify": [true, [], 1], "score": [], "card": []}"#),
    ("key-twice", r#"{"score": {"max_accuracy_drop": 0.5, "max_accuracy_drop": 0.1}}"#),
    ("unknown-key", r#"{"score": {"max_acuracy_drop": 0.1}, "mtp": false}"#),
    (
        "beyond-bounds",
        r#"{"score": {"max_accuracy_drop": 1e308, "max_kl_mean": -1, "min_questions": 18446744073709551615}}"#,
    ),
    ("open-fence", "{\"card\": {\"notes\": \"```\\nrm\"}}"),
    ("control-characters", "{\"card\": {\"base_model\": \"a\\u001b[2J/b\", \"\\u202e\": 1}}"),
    ("not-utf-8-by-half", "{\"card\": {\"notes\": \"\\ud800\"}}"),
];

/// Texts of listings, of the two files that the target knows.
pub const LISTINGS: [(&str, &str); 12] = [
    (
        "tree",
        r#"[{"type": "directory", "oid": "00", "size": 0, "path": "folder"},
 {"type": "file", "oid": "ce013625030ba8dba906f756967f9e9ca394464a", "size": 6, "path": "config.json"},
 {"type": "file", "oid": "11", "size": 6, "path": "out-00000.safetensors", "xetHash": "22",
  "lfs": {"oid": "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03", "size": 6, "pointerSize": 130}}]"#,
    ),
    (
        "library",
        r#"[{"path": "config.json", "size": 6, "blob_id": "ce013625030ba8dba906f756967f9e9ca394464a", "lfs": null},
 {"path": "out-00000.safetensors", "size": 6, "blob_id": "11",
  "lfs": {"size": 6, "sha256": "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03", "pointer_size": 130}},
 {"path": "folder", "tree_id": "00", "last_commit": null}]"#,
    ),
    ("siblings", r#"{"siblings": [{"rfilename": "config.json", "size": 7, "blobId": "ce01", "lfs": null}]}"#),
    ("names-alone", r#"{"siblings": [{"rfilename": "config.json"}, {"rfilename": "a\u001b[2J"}]}"#),
    ("strings", r#"["config.json", "out-00000.safetensors"]"#),
    ("size-missing", r#"[{"path": "a", "size": 1}, {"path": "b", "type": "file"}]"#),
    ("twice", r#"[{"path": "config.json", "size": 6, "oid": "00"}, {"path": "config.json", "size": 6, "oid": "01"}]"#),
    ("pages", "[{\"path\": \"config.json\", \"size\": 6}]\n[{\"path\": \"extra\", \"size\": 18446744073709551615}]"),
    ("lines", "{\"path\": \"config.json\", \"size\": 5}\n{\"path\": \"../x\", \"size\": 0}\n"),
    ("refusal", r#"{"error": "Repository not found"}"#),
    ("other-hash", r#"[{"path": "out-00000.safetensors", "size": 6, "lfs": {"oid": "sha256:00", "size": 6}}]"#),
    ("empty-list", "[]"),
];

/// Texts of pipelines.
pub const PIPELINES: [(&str, &str); 7] = [
    ("small", r#"{"checkpoint": "a", "container": "b", "reports": "c", "score": {"tasks": {"t": "t.jsonl"}}}"#),
    (
        "all-keys",
        r#"{"checkpoint": "a", "container": "b", "reports": "c", "threads": 3, "memory": 1000000,
 "convert": {"recipe": {"group_size": "row", "xbits": 3, "rules": [{"tensor": "*.o_proj.weight", "format": "int8-row"}]},
  "mtp": true, "indexer": true, "follow": true, "consume": true, "allow_ambiguous": true, "allow_non_finite": true,
  "allow_incomplete": true},
 "verify": {"source": false, "references": ["r.json"], "devices": ["cpu", "reference"]},
 "score": {"tasks": {"t": "t.jsonl"}, "texts": {"u": "u.txt"}, "limit": 10, "seed": 7, "prefix": "none", "probes": true,
  "baseline": "d"},
 "publish": {"repo_id": "o/n", "policy": {"score": {"max_kl_mean": 0.1}, "card": {"notes": "n"}}}}"#,
    ),
    ("lists", r#"{"checkpoint": "a", "container": "b", "reports": "c", "score": [], "convert": []}"#),
    (
        "key-twice",
        r#"{"checkpoint": "a", "checkpoint": "b", "container": "b", "reports": "c", "score": {"tasks": {"t": "1", "t": "2"}}}"#,
    ),
    ("unknown-key", r#"{"checkpoint": "a", "container": "b", "reports": "c", "score": {}, "scores": {}}"#),
    (
        "policy",
        r#"{"checkpoint": "a", "container": "b", "reports": "c", "score": {}, "publish": {"policy": {"verify": {"min_devices": 0}}}}"#,
    ),
    (
        "control-characters",
        r#"{"checkpoint": "a\u0000\u001b[2J", "container": "\u202e", "reports": "c", "score": {"tasks": {"\u0007": "t"}}}"#,
    ),
];
