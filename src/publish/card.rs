//! The model card: README.md of the repository, made of manifest and reports alone, so that the same container with the
//! same reports has the same card.

mod tables;

use std::collections::BTreeSet;
use std::path::Path;

use super::evidence::Evidence;
use super::front::{Front, Writer};
use super::policy::CardPolicy;
use super::recipe;
use crate::container::manifest::{CARD_FILE, CARD_MARK, MANIFEST_FILE, Manifest, SUMS_FILE};
use crate::error::{Fault, FaultKind, Place, counted};

pub use tables::{Totals, class_rows};
use tables::{drafts_text, formats_table, scores_text, tokens_table};

/// What a card is made of.
#[derive(Debug)]
pub struct Subject<'a> {
    /// The container.
    pub container: &'a Path,
    /// Its name on the Hub.
    pub repo_id: Option<&'a str>,
    /// Its manifest.
    pub manifest: &'a Manifest,
    /// The reports about it.
    pub evidence: &'a Evidence,
    /// What the source's card says.
    pub front: &'a Front,
    /// Name of the source's card beside this one.
    pub source_card: Option<&'a str>,
    /// What the user wants the card to say.
    pub policy: &'a CardPolicy,
}

/// Whether a file is a licence, by its name.
pub fn is_license(name: &str) -> bool {
    let stem = name.split('.').next().unwrap_or_default().to_ascii_uppercase();
    ["LICENSE", "LICENCE", "COPYING"].contains(&&*stem)
}

impl Subject<'_> {
    /// What the card cannot say: the licence or its text, or the model that this one was made from.
    pub fn unknown(&self) -> Vec<FaultKind> {
        let license = self.license().is_none().then_some(FaultKind::LicenseUnknown);
        let base = self.base_model().is_empty().then_some(FaultKind::BaseModelUnknown);
        license.into_iter().chain(base).chain(self.dead_link()).collect()
    }

    /// `license_link` that names a file which the container lacks: a dead link on the Hub.
    fn dead_link(&self) -> Option<FaultKind> {
        let (_, _, link) = self.license()?;
        let link = link.filter(|link| !link.contains("://"))?;
        let name = link.strip_prefix("./").unwrap_or(&link);
        let there = self.manifest.small_files.iter().any(|file| file.name == name);
        (!there).then(|| FaultKind::LicenseLinkDead { found: link.clone() })
    }

    /// Faults of the card: only what the policy demands is an error.
    pub fn check(&self) -> (Vec<Fault>, Vec<Fault>) {
        let demanded = |kind: &FaultKind| matches!(kind, FaultKind::LicenseUnknown) && self.policy.license;
        let (errors, warnings): (Vec<_>, Vec<_>) = self.unknown().into_iter().partition(demanded);
        let placed = |kinds: Vec<FaultKind>| {
            kinds.into_iter().map(|kind| Fault::new(Place::file(self.container.join(CARD_FILE)), kind)).collect()
        };
        (placed(errors), placed(warnings))
    }

    /// Licence, and name and link of one that the Hub does not list.
    fn license(&self) -> Option<(String, Option<String>, Option<String>)> {
        let front = self.front;
        let file = self.manifest.small_files.iter().find(|file| is_license(&file.name));
        match (&front.license, file) {
            (Some(license), _) => Some((license.clone(), front.license_name.clone(), front.license_link.clone())),
            (None, Some(file)) => {
                Some(("other".to_owned(), Some("source-license".to_owned()), Some(file.name.clone())))
            }
            (None, None) => None,
        }
    }

    fn base_model(&self) -> Vec<String> {
        // What is no repository would be a dead link.
        let named = || self.front.base_model.iter().filter(|id| super::check_repo_id(id).is_ok()).cloned().collect();
        self.policy.base_model.clone().map_or_else(named, |base| vec![base])
    }

    /// The name that stands at the top.
    fn title(&self) -> String {
        let own = self.container.canonicalize().unwrap_or_else(|_| self.container.to_owned());
        let directory = || own.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = self.repo_id.map(|id| id.rsplit('/').next().unwrap_or(id).to_owned());
        name.or_else(directory).unwrap_or_else(|| "container".to_owned())
    }

    /// The text of the card.
    pub fn text(&self) -> String {
        let totals = Totals::of(self.manifest);
        let mut out = self.yaml(&totals);
        out += &format!("\n{CARD_MARK}\n\n# {}\n\n{}\n", escaped(&self.title()), self.introduction(&totals));
        if let Some(notes) = &self.policy.notes {
            out += &format!("\n{}\n", notes.trim());
        }
        out += &format!("\n## Formats\n\n{}", formats_table(self.manifest));
        out += &self.verification();
        out += &scores_text(&self.evidence.score, &self.evidence.verify);
        out += &self.made();
        out += &self.checking();
        out
    }

    fn yaml(&self, totals: &Totals) -> String {
        let mut yaml = Writer::default();
        if let Some((license, name, link)) = self.license() {
            match self.front.more_licenses.as_slice() {
                [] => yaml.text("license", &license),
                more => yaml.list("license", &[std::slice::from_ref(&license), more].concat()),
            }
            name.iter().for_each(|name| yaml.text("license_name", name));
            link.iter().for_each(|link| yaml.text("license_link", link));
        }
        yaml.list("language", &self.front.language);
        let base_model = self.base_model();
        yaml.list("base_model", &base_model);
        if !base_model.is_empty() {
            yaml.text("base_model_relation", "quantized");
        }
        yaml.text("library_name", "colibri");
        yaml.text("pipeline_tag", self.front.pipeline_tag.as_deref().unwrap_or("text-generation"));
        let mut tags = vec!["colibri".to_owned(), "coliconv".to_owned(), self.manifest.model_type.clone()];
        tags.extend(totals.formats.iter().map(|format| format.split('(').next().unwrap_or_default().to_owned()));
        let mut seen = BTreeSet::new();
        tags.retain(|tag| seen.insert(tag.clone()));
        yaml.list("tags", &tags);
        yaml.list("quantization", &totals.formats);
        yaml.number("parameters", totals.parameters);
        yaml.number("weight_files", self.manifest.files.len() as u64);
        yaml.number("weight_bytes", totals.file_bytes);
        yaml.finish()
    }

    fn introduction(&self, totals: &Totals) -> String {
        let base = match self.base_model().as_slice() {
            [] => "A quantized model".to_owned(),
            names => {
                let link = |name: &String| format!("[{}](https://huggingface.co/{name})", escaped(name));
                format!("{}, quantized", names.iter().map(link).collect::<Vec<_>>().join(", "))
            }
        };
        let kept = match self.source_card {
            Some(name) => format!(" The source's own card is [{name}]({name})."),
            None => String::new(),
        };
        let has = |pass: &str| self.manifest.passes.contains_key(pass);
        let with = match (has("mtp"), has("indexer")) {
            (true, true) => ", MTP head and DSA indexer included",
            (true, false) => ", MTP head included",
            (false, true) => ", DSA indexer included",
            (false, false) => "",
        };
        format!(
            "{base}: a container for the colibri engine, {} parameters in {} ({:.2} bits each), {} of weights{with}.{kept}",
            tables::human_count(totals.parameters),
            tables::human_bytes(totals.file_bytes),
            8.0 * totals.weight_bytes as f64 / totals.parameters.max(1) as f64,
            counted(self.manifest.files.len() as u64, "file"),
        )
    }

    fn verification(&self) -> String {
        let mut out = "\n## Verification\n\nThese very files passed `coliconv verify`: ".to_owned();
        let checks = self.evidence.verify.iter().flat_map(|told| &told.report.checks);
        let mut names: Vec<&str> = Vec::new();
        for check in checks.filter(|check| check.status == crate::report::CheckStatus::Pass) {
            if !names.contains(&check.name.as_str()) {
                names.push(&check.name);
            }
        }
        out += &format!("{}.\n", names.join(", "));
        out += &tokens_table(&self.evidence.verify);
        out + &drafts_text(&self.evidence.verify, &self.evidence.score)
    }

    fn made(&self) -> String {
        let (command, recipe) = recipe::command(self.manifest);
        let mut out =
            format!("\n## How it was made\n\nBy {}:\n\n```sh\n{command}\n```\n", escaped(&self.manifest.tool));
        if let Some(recipe) = recipe {
            out += &format!("\nwith `{}`:\n\n```json\n{recipe}\n```\n", recipe::RECIPE_FILE);
        }
        let source: u64 = self.manifest.source.iter().map(|file| file.bytes).sum();
        out += &format!(
            "\nfrom {} of {}; `{MANIFEST_FILE}` has names, sizes and header hashes.\n",
            counted(self.manifest.source.len() as u64, "file"),
            tables::human_bytes(source)
        );
        if !self.manifest.warnings.is_empty() {
            out += "\nWhat was accepted although it is odd:\n\n";
            out.extend(self.manifest.warnings.iter().map(|warning| {
                let file = warning.file.as_deref().and_then(|file| file.rsplit(['/', '\\']).next());
                let place =
                    [file, warning.tensor.as_deref()].into_iter().flatten().map(|part| format!("{}: ", escaped(part)));
                format!("- {}{}\n", place.collect::<String>(), escaped(&warning.message))
            }));
        }
        out
    }

    fn checking(&self) -> String {
        let id = self.repo_id.unwrap_or("ORG/NAME");
        format!(
            "\n## Checking a download\n\n```sh\nhf download {id} --local-dir CONTAINER\ncd CONTAINER && sha256sum -c {SUMS_FILE} && cd ..\n\
             coliconv verify CONTAINER --level payload\n```\n"
        )
    }
}

/// Text within a line of Markdown: nothing in it is markup, and a table's cell does not end.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in crate::error::escaped_whole(text).to_string().chars() {
        match c {
            '<' => out += "&lt;",
            '&' => out += "&amp;",
            '|' | '*' | '_' | '`' | '[' | ']' | '#' | '~' | '\\' | '!' => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out
}
