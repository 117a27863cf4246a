//! What commands say of their flags, in the words of a pipeline's file.

use crate::report::Finding;

/// The keys of a pipeline that are what flags of the commands are.
const KEYS: [(&str, &str); 34] = [
    ("--allow-ambiguous", "convert.allow_ambiguous"),
    ("--allow-excluded", "publish.policy.score.allow_excluded"),
    ("--allow-incomplete", "convert.allow_incomplete"),
    ("--allow-non-finite", "convert.allow_non_finite"),
    ("--attn-bits", "convert.recipe.attn_bits"),
    ("--baseline", "score.baseline"),
    ("--consume", "convert.consume"),
    ("--device", "verify.devices"),
    ("--device-memory", "device_memory"),
    ("--dmlp-bits", "convert.recipe.dmlp_bits"),
    ("--down-bits", "convert.recipe.down_bits"),
    ("--ebits", "convert.recipe.ebits"),
    ("--follow", "convert.follow"),
    ("--gate-bits", "convert.recipe.gate_bits"),
    ("--group-size", "convert.recipe.group_size"),
    ("--indexer", "convert.indexer"),
    ("--io-bits", "convert.recipe.io_bits"),
    ("--kvb-bits", "convert.recipe.kvb_bits"),
    ("--limit", "score.limit"),
    ("--memory", "memory"),
    ("--mtp", "convert.mtp"),
    ("--o-bits", "convert.recipe.o_bits"),
    ("--out", "reports"),
    ("--policy", "publish.policy"),
    ("--prefix", "score.prefix"),
    ("--probes", "score.probes"),
    ("--recipe", "convert.recipe"),
    ("--reference", "verify.references"),
    ("--repo-id", "publish.repo_id"),
    ("--seed", "score.seed"),
    ("--shared-bits", "convert.recipe.shared_bits"),
    ("--source", "verify.source"),
    ("--up-bits", "convert.recipe.up_bits"),
    ("--xbits", "convert.recipe.xbits"),
];

/// The same finding with a pipeline's keys where it speaks of flags. A whole command in backquotes stays: it can be given
/// by hand.
pub fn reworded(finding: Finding) -> Finding {
    let own = own_hint(&finding);
    let hint = own.map(str::to_owned).or_else(|| finding.hint.as_deref().map(in_keys));
    Finding { message: in_keys(&finding.message), hint, ..finding }
}

/// What to do in a pipeline, where it is something else than what the command would ask for.
fn own_hint(finding: &Finding) -> Option<&'static str> {
    let says = |what: &str| finding.message.contains(what);
    let text = match finding.kind.as_str() {
        "nothing-to-score" => "give `score.tasks` or `score.texts`",
        "input-name-twice" => {
            "every task and text needs a name of its own, over `score.tasks` and `score.texts` together"
        }
        "results-in-model" | "out-not-directory" => {
            "give a directory of its own as `reports`; it is made where there is none"
        }
        "results-other" | "not-results" | "results-damaged" => {
            "give another directory as `reports`; nothing existing is mixed or overwritten"
        }
        "other-report" => "move it away; only a report or plan of an earlier run is replaced",
        "destination-used" | "other-parameters" | "other-source" | "output-exists" | "same-directory" => {
            "give another, empty directory as `container`; nothing existing is overwritten"
        }
        "other-division" | "parts-missing" => {
            "finish it with the parts that it was begun in, or give another, empty directory as `container`"
        }
        "report-unbound" | "report-contradicts" | "report-of-other-bytes" | "report-of-part" | "not-a-report" => {
            "remove it from `reports` and run the pipeline again: it is made anew"
        }
        "report-says-no" => "the report itself says what is wrong; what is corrected, the same pipeline verifies anew",
        "baseline-not-source"
        | "baseline-other-source"
        | "baseline-other"
        | "baseline-same-model"
        | "baseline-empty" => "leave `score.baseline` out: then the checkpoint is scored as the container is",
        "gpu-library" | "gpu-symbol" | "gpu-ordinal" | "gpu-api" | "gpu-lacks" | "gpu-too-old" => {
            "leave it out of `verify.devices`, or make it usable: `coliconv devices` says what there is, and what it lacks"
        }
        "gpu-memory" => "leave the GPU out of `verify.devices`, or end what else uses it",
        "gpus-memory" => "name more GPUs in `verify.devices`, or end what else uses them",
        "gpu-memory-limit" | "gpu-experts-memory" => {
            "give a larger `device_memory`, or leave the GPU out of `verify.devices`"
        }
        "base-model-unknown" => "set `publish.policy.card.base_model` to ORG/NAME of the source",
        "reference-of-itself" => {
            "give `verify.references` of another implementation or of the checkpoint, or set `verify.source` to true"
        }
        "evidence-missing" if says("drafts") => "set `score.probes` to true",
        "evidence-missing" if says("comparison of the weights") => "set `verify.source` to true",
        "evidence-missing" if says("verification") => "give `verify.references`, or set `verify.source` to true",
        "policy-missed" if says("the mode in which") => {
            "leave `score.baseline` out, or give scores of the source in exact mode"
        }
        "policy-missed" if says("devices") => "name more in `verify.devices`",
        "policy-missed" if says("the number of references") => {
            "give more `verify.references`, or set `verify.source` to true"
        }
        "policy-missed" if says("the number of predictions") => {
            "give more or longer `verify.references`, or set `verify.source` to true"
        }
        "policy-missed" if says("rows") => {
            "the report says why rows got no score: mend them, or set `publish.policy.score.allow_excluded` to true"
        }
        "policy-missed" if says("log-probability") || says("near-ties") => {
            "more bits change nothing here: look at how the references were made, or ask for less in `publish.policy`"
        }
        "policy-missed" if says("agreement with the source is not known") => "set `verify.source` to true",
        "policy-missed"
            if ["questions", "tokens of", "tasks", "texts"]
                .into_iter()
                .any(|of| says(&format!("the number of {of}"))) =>
        {
            "score more: other `score.tasks` and `score.texts`, or a larger `score.limit`"
        }
        "policy-missed" if says("drafts") => {
            "the MTP head is of no use: convert it anew, or ask for less in `publish.policy`"
        }
        "policy-missed" => "convert with more bits into another `container`, or ask for less in `publish.policy`",
        _ => return None,
    };
    Some(text)
}

/// Flags become keys, but not those of a whole command.
fn in_keys(text: &str) -> String {
    let parts = text.split('`').enumerate().map(|(at, part)| match at % 2 {
        0 => with_keys(part, "`"),
        _ if part.starts_with("coliconv ") => part.to_owned(),
        _ => with_keys(part, ""),
    });
    parts.collect::<Vec<_>>().join("`")
}

fn with_keys(text: &str, quote: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("--") {
        let length = rest[at..].find(|c: char| !(c == '-' || c.is_ascii_lowercase())).unwrap_or(rest.len() - at);
        let flag = &rest[at..at + length];
        out += &rest[..at];
        match KEYS.iter().find(|(known, _)| *known == flag) {
            Some((_, key)) => out += &format!("{quote}{key}{quote}"),
            None => out += flag,
        }
        rest = &rest[at + length..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_become_keys_and_commands_stay() {
        let cases = [
            (
                "score the baseline with the same --limit, --seed",
                "score the baseline with the same `score.limit`, `score.seed`",
            ),
            (
                "run `coliconv convert --mtp` by hand, or --mtp",
                "run `coliconv convert --mtp` by hand, or `convert.mtp`",
            ),
            ("give `--out`", "give `reports`"),
            ("--output and -- and --x", "--output and -- and --x"),
            ("ends with --mtp", "ends with `convert.mtp`"),
            ("", ""),
        ];
        for (text, expected) in cases {
            assert_eq!(in_keys(text), expected);
        }
        assert!(KEYS.is_sorted());
    }

    /// A new flag in a hint is either a key, or has no meaning in a pipeline and is listed here.
    #[test]
    fn no_hint_speaks_of_a_flag_that_a_pipeline_lacks() {
        let elsewhere = [
            "--and",
            "--chat",
            "--finish",
            "--inject-fault",
            "--level",
            "--max-tokens",
            "--mode",
            "--no-deps",
            "--only",
            "--part",
            "--report",
            "--requests",
            "--size",
            "--summary", // of vulkaninfo
            "--task",
            "--text",
            "--verify",
            "--write-reference",
        ];
        let source = include_str!("../error/hint.rs");
        for (at, _) in source.match_indices("--") {
            let flag: String = source[at..].chars().take_while(|&c| c == '-' || c.is_ascii_lowercase()).collect();
            let known = KEYS.iter().any(|(known, _)| *known == flag) || elsewhere.contains(&&*flag);
            assert!(known || !flag[2..].starts_with(|c: char| c.is_ascii_lowercase()), "{flag}");
        }
    }
}
