//! Scoring requests that have much in common, on any device: tokens through the layers, and tokens that are written out.

use std::path::Path;

use super::kernels::Random;
use super::synthetic::{Contents, Synthetic};
use super::{Options, Scratch, check_space, measure};
use crate::config::Config;
use crate::error::{Faults, Result};
use crate::io::write_whole;
use crate::progress::Progress;
use crate::report::BenchMeasure;
use crate::score::encode::PrefixChoice;
use crate::score::input::{Given, Kind};
use crate::score::{self, Unwatched, score};

/// Least and most questions, each with as many choices, and bytes of a model for one of them.
const LEAST_QUESTIONS: u64 = 2;
const MOST_QUESTIONS: u64 = 64;
const QUESTION_BYTES: u64 = 16 << 20;
const CHOICES: usize = 4;
/// Tokens of what a row of questions begins with, and how many questions that are.
const EXAMPLES: usize = 48;
const WITH_EXAMPLES: usize = 16;
/// Tokens of a question, and of a choice at most.
const QUESTION: usize = 32;
const CHOICE: usize = 8;

/// Makes a container and scores requests with it: the GPU's name, and measures.
pub(super) fn measures(
    synthetic: &Synthetic,
    options: &Options,
    progress: &dyn Progress,
) -> Result<(Option<String>, Vec<BenchMeasure>), Faults> {
    let gpu = super::gpu::opened(options.device, options.mode, synthetic.bytes()?)?;
    let scratch = Scratch::create(&options.directory, progress)?;
    let (container, requests) = (scratch.path.join("model"), scratch.path.join("requests.txt"));
    check_space(&container, synthetic.bytes()?)?;
    progress.step("making a container");
    synthetic.write(&container, Contents::Model, true, progress)?;
    let questions = (synthetic.bytes()? / QUESTION_BYTES).clamp(LEAST_QUESTIONS, MOST_QUESTIONS) as usize;
    let (text, written) = requests_of(questions, Config::read(&container)?.vocab_size);
    write_whole(&requests, text.as_bytes(), false)?;
    let scoring = score::Options {
        inputs: vec![Given { kind: Kind::Requests, name: "requests".to_owned(), path: requests }],
        prefix: PrefixChoice::None,
        device: Some(options.device),
        mode: options.mode,
        threads: options.threads,
        ..score::Options::default()
    };
    let measure = rounds(&container, &scoring, written, options, progress)?;
    let name = format!("score, {} requests, {}", CHOICES * questions, measure.name);
    Ok((gpu, vec![BenchMeasure { name, ..measure }]))
}

/// The rounds: each loads the model anew, which does not count.
fn rounds(
    container: &Path,
    scoring: &score::Options,
    written: u64,
    options: &Options,
    progress: &dyn Progress,
) -> Result<BenchMeasure, Faults> {
    let (mut seconds, mut through) = (Vec::new(), 0);
    for number in 0..options.rounds {
        progress.step(&format!("scoring, round {} of {}", number + 1, options.rounds));
        let report = score(container, scoring, &Unwatched)?;
        through = report.tokens;
        seconds.push(through as f64 / report.tokens_per_second.unwrap_or(f64::INFINITY));
    }
    let measure = measure(&format!("{through} tokens through the layers"), &seconds, None);
    let rate = |tokens: u64| Some(tokens as f64 / measure.fastest_seconds.max(1e-9));
    Ok(BenchMeasure {
        tokens_per_second: rate(through),
        written_out_tokens_per_second: rate(written),
        clock: options.device.is_gpu().then(|| "host".to_owned()),
        ..measure
    })
}

/// Requests as `score` reads them, and their tokens when each is written out: the same in every run. Questions in a row
/// begin with the same examples; the choices of a question differ in length.
fn requests_of(questions: usize, vocab_size: u64) -> (String, u64) {
    let mut random = Random::new(21);
    let mut ids = |count: usize| -> Vec<u64> { (0..count).map(|_| (random.next() >> 8) % vocab_size).collect() };
    let (mut text, mut written) = (String::new(), 0);
    let mut examples = Vec::new();
    for question in 0..questions {
        if question % WITH_EXAMPLES == 0 {
            examples = ids(EXAMPLES);
        }
        let asked = [&examples[..], &ids(QUESTION)].concat();
        for choice in 0..CHOICES {
            let continuation = ids(CHOICE - choice);
            written += (asked.len() + continuation.len()) as u64;
            text += &format!("{} {}", asked.len(), continuation.len());
            asked.iter().chain(&continuation).for_each(|id| text += &format!(" {id}"));
            text.push('\n');
        }
    }
    (text, written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_always_the_same_and_share_beginnings() {
        let (text, written) = requests_of(20, 1000);
        assert_eq!((text.clone(), written), requests_of(20, 1000));
        let rows: Vec<Vec<u64>> =
            text.lines().map(|line| line.split(' ').map(|word| word.parse().unwrap()).collect()).collect();
        assert_eq!(rows.len(), 20 * CHOICES);
        assert!(rows.iter().all(|row| row.len() as u64 == 2 + row[0] + row[1]));
        assert_eq!(rows.iter().map(|row| row[0] + row[1]).sum::<u64>(), written);
        let context = |row: &Vec<u64>| row[2..2 + row[0] as usize].to_vec();
        assert_eq!(context(&rows[0]), context(&rows[3]));
        assert_eq!(context(&rows[0])[..EXAMPLES], context(&rows[CHOICES * (WITH_EXAMPLES - 1)])[..EXAMPLES]);
        assert_ne!(context(&rows[0])[..EXAMPLES], context(&rows[CHOICES * WITH_EXAMPLES])[..EXAMPLES]);
        assert!(rows.iter().all(|row| row[2..].iter().all(|&id| id < 1000)));
    }
}
