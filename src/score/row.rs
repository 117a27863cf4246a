//! Scores of rows, many of them at once.

use super::distribution::{Distribution, TOP_K, Top, rounded};
use super::encode::{Encoded, Encoder};
use super::input::{Content, Input, Item};
use super::plan::Ask;
use super::record::{Against, Exclusion, Record, Scored};
use super::results::Stored;
use super::runner::Runner;
use crate::backend::Backend;
use crate::error::{FaultKind, Result};
use crate::limits;
use crate::model::Model;

/// What a model is compared with.
pub enum Baseline<'m, 'b, B: Backend> {
    /// Nothing.
    None,
    /// Results of an earlier run.
    Stored(&'m Stored),
    /// Another model, run beside it.
    Model(&'m Model<'b, B>),
}

/// Scores rows with one model: many at once.
pub struct Scorer<'m, 'b, B: Backend> {
    runner: Runner<'m, 'b, B>,
    stored: Option<&'m Stored>,
    encoder: &'m Encoder<'m>,
    /// Whether distributions are recorded.
    store: bool,
    tag: Option<String>,
    /// Tokens that go through the layers together.
    rows: usize,
    /// Rows that wait for others, and their tokens.
    waiting: Vec<Waiting>,
    tokens: usize,
}

/// A row that has no result yet.
struct Waiting {
    record: Record,
    texts: Result<Vec<Continuation>, FaultKind>,
}

/// A continuation with what is said of it beside its score.
struct Continuation {
    encoded: Encoded,
    chars: u64,
    bytes: u64,
    space: bool,
}

/// The texts of a row, or why it has none; and the right one.
type Texts = (Result<Vec<Continuation>, FaultKind>, Option<usize>);

/// What is said of one token.
struct Said {
    logprob: f64,
    best: bool,
    top: Option<Top>,
    against: Option<Compared>,
}

/// How the baseline sees the same token.
struct Compared {
    logprob: f64,
    best: bool,
    agreed: bool,
    kl: f64,
}

impl<'m, 'b, B: Backend> Scorer<'m, 'b, B> {
    /// A scorer that has seen nothing. `tag` marks what was compared with the baseline;
    /// `rows` tokens go through the layers together.
    pub fn new(
        model: &'m Model<'b, B>,
        baseline: Baseline<'m, 'b, B>,
        encoder: &'m Encoder<'m>,
        store: bool,
        tag: Option<&str>,
        rows: usize,
    ) -> Result<Self> {
        let (stored, theirs) = match baseline {
            Baseline::None => (None, None),
            Baseline::Stored(stored) => (Some(stored), None),
            Baseline::Model(model) => (None, Some(model)),
        };
        let runner = Runner::new(model, theirs, rows)?;
        Ok(Scorer { runner, stored, encoder, store, tag: tag.map(str::to_owned), rows, waiting: Vec::new(), tokens: 0 })
    }

    /// Tokens that went through the model's layers.
    pub fn computed(&self) -> u64 {
        self.runner.computed
    }

    /// Takes a row. Once enough of them wait they are scored: their records, in the order in which they came.
    pub fn add(&mut self, input: &Input, item: Item) -> Result<Vec<Record>> {
        let (texts, gold) = self.texts(item.row, item.content)?;
        self.tokens += texts.iter().flatten().map(|text| text.encoded.ids.len()).sum::<usize>();
        let record = Record {
            input: input.name.clone(),
            row: item.row,
            gold,
            scores: Vec::new(),
            excluded: None,
            baseline: self.tag.clone(),
        };
        self.waiting.push(Waiting { record, texts });
        // Texts of one row have much in common, so these are fewer tokens that go through the layers.
        let full = self.tokens >= limits::WAITING_BATCHES * self.rows || self.waiting.len() >= limits::WAITING_ROWS;
        if full { self.finish() } else { Ok(Vec::new()) }
    }

    /// Scores what waits.
    pub fn finish(&mut self) -> Result<Vec<Record>> {
        self.tokens = 0;
        let mut waiting = std::mem::take(&mut self.waiting);
        // Texts of all rows, one after the other, with their row and number there.
        let mut places = Vec::new();
        let mut encoded = Vec::new();
        for (row, waiting) in waiting.iter_mut().enumerate() {
            for (choice, text) in waiting.texts.iter_mut().flatten().enumerate() {
                places.push((row, choice));
                encoded.push(std::mem::replace(&mut text.encoded, Encoded { ids: Vec::new(), start: 0 }));
            }
        }
        let stored = match self.stored {
            None => Vec::new(),
            Some(stored) => {
                let get = |waiting: &Waiting| stored.get(&waiting.record.input, waiting.record.row);
                waiting.iter().map(get).collect::<Result<_>>()?
            }
        };
        let theirs = |text: usize| {
            let (row, choice) = places[text];
            stored.get(row)?.as_ref()?.scores.get(choice)
        };
        let look = |asks: &[Ask], own: &[f32], logits: Option<&[f32]>| -> Vec<Option<Said>> {
            let Some(own) = Distribution::of(own) else { return asks.iter().map(|_| None).collect() };
            let top = self.store.then(|| own.top(TOP_K));
            let other = logits.and_then(Distribution::of);
            let kl = other.as_ref().map(|other| rounded(own.divergence_from(other)));
            let of = |ask: &Ask| {
                let against = match (&other, theirs(ask.text)) {
                    (Some(other), _) => beside(&own, other, kl.unwrap_or_default(), ask.id),
                    (None, Some(scored)) => scored.top.get(ask.at).map(|top| below(&own, top)),
                    (None, None) => None,
                };
                said(&own, top.clone(), against, ask.id)
            };
            asks.iter().map(of).collect()
        };
        let mut answers = match encoded.is_empty() {
            true => Vec::new(),
            false => self.runner.run(&encoded, look)?,
        }
        .into_iter();
        let mut records = Vec::with_capacity(waiting.len());
        let mut text = 0;
        for Waiting { mut record, texts } in waiting {
            let scores = texts.and_then(|texts| {
                let scores: Option<Vec<Scored>> = texts
                    .into_iter()
                    .zip(answers.by_ref())
                    .map(|(continuation, answers)| {
                        text += 1;
                        scored(continuation, answers, theirs(text - 1))
                    })
                    // All of them are gone through, even behind one without a score.
                    .collect::<Vec<_>>()
                    .into_iter()
                    .collect();
                scores.ok_or(FaultKind::RowNotFinite { row: record.row })
            });
            match scores {
                Ok(scores) => record.scores = scores,
                Err(kind) => {
                    let (message, hint) = (kind.to_string(), kind.hint());
                    record.excluded = Some(Exclusion { kind: kind.name().to_owned(), message, hint });
                }
            }
            records.push(record);
        }
        Ok(records)
    }

    fn texts(&self, row: u64, content: Result<Content, FaultKind>) -> Result<Texts> {
        let with_row = |encoded: Result<Encoded, super::encode::Reason>| encoded.map_err(|reason| reason(row));
        let of = |encoded, text: &str| Continuation {
            encoded,
            chars: text.chars().count() as u64,
            bytes: text.len() as u64,
            space: text.starts_with(' '),
        };
        Ok(match content {
            Err(kind) => (Err(kind), None),
            Ok(Content::Request(line)) => {
                (with_row(self.encoder.request(&line)).map(|encoded| vec![of(encoded, "")]), None)
            }
            Ok(Content::Document(text)) => {
                let encoded = with_row(self.encoder.document(&text)?);
                let text = text.strip_prefix(self.encoder.prefix).unwrap_or(&text);
                (encoded.map(|encoded| vec![of(encoded, text)]), None)
            }
            Ok(Content::Question(question)) => {
                let mut texts = Ok(Vec::with_capacity(question.pairs.len()));
                for pair in &question.pairs {
                    let encoded = with_row(self.encoder.continuation(&pair.ctx, &pair.continuation)?);
                    match (&mut texts, encoded) {
                        (Ok(texts), Ok(encoded)) => texts.push(of(encoded, &pair.continuation)),
                        (Ok(_), Err(kind)) => texts = Err(kind),
                        (Err(_), _) => {}
                    }
                }
                (texts, Some(question.gold))
            }
        })
    }
}

/// What the model says of a token; `None` if it is not finite.
fn said(own: &Distribution<'_>, top: Option<Top>, against: Option<Compared>, id: u32) -> Option<Said> {
    let logprob = own.logprob(id);
    logprob.is_finite().then_some(Said { logprob, best: own.best == id, top, against })
}

/// What another model's distribution says beside it. Where it is not finite nothing is said.
fn beside(own: &Distribution<'_>, theirs: &Distribution<'_>, kl: f64, id: u32) -> Option<Compared> {
    let logprob = theirs.logprob(id);
    let (best, agreed) = (theirs.best == id, theirs.best == own.best);
    logprob.is_finite().then_some(Compared { logprob, best, agreed, kl })
}

/// What a stored top says; its sums are stored, too.
fn below(own: &Distribution<'_>, top: &Top) -> Compared {
    let agreed = top.ids.first() == Some(&own.best);
    Compared { logprob: 0.0, best: true, agreed, kl: rounded(own.divergence_from_top(top)) }
}

/// The score of a continuation from what is said of its tokens; `None` if something of it is not finite.
fn scored(continuation: Continuation, said: Vec<Option<Said>>, stored: Option<&Scored>) -> Option<Scored> {
    let Continuation { chars, bytes, space, .. } = continuation;
    let tokens = said.len();
    let mut scored = Scored {
        logprob: 0.0,
        tokens: tokens as u64,
        greedy: true,
        chars,
        bytes,
        space,
        top: Vec::new(),
        against: None,
    };
    let mut against = Against { logprob: 0.0, greedy: true, agreed: 0, kl: Vec::new() };
    for said in said {
        let said = said?;
        scored.logprob += said.logprob;
        scored.greedy &= said.best;
        scored.top.extend(said.top);
        if let Some(compared) = said.against {
            against.logprob += compared.logprob;
            against.greedy &= compared.best;
            against.agreed += u64::from(compared.agreed);
            against.kl.push(compared.kl);
        }
    }
    if let Some(stored) = stored {
        (against.logprob, against.greedy) = (stored.logprob, stored.greedy);
    }
    // A baseline without a score, or with another number of tokens, is compared with nothing.
    scored.against = Some(against).filter(|against| against.kl.len() == tokens);
    Some(scored)
}
