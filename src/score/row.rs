//! The score of one row.

use super::distribution::{Distribution, TOP_K, rounded};
use super::encode::{Encoded, Encoder};
use super::input::{Content, Input, Item};
use super::record::{Against, Exclusion, Record, Scored};
use super::results::Stored;
use super::runner::{Hidden, Runner};
use crate::backend::Backend;
use crate::error::{FaultKind, Result};
use crate::model::Model;

/// What a model is compared with.
pub enum Baseline<'m, 'b, B: Backend> {
    /// Nothing.
    None,
    /// Results of an earlier run.
    Stored(&'m Stored),
    /// Another model, run beside it.
    Model(Box<Runner<'m, 'b, B>>),
}

impl<'m, 'b, B: Backend> Baseline<'m, 'b, B> {
    /// Another model.
    pub fn model(model: &'m Model<'b, B>) -> Result<Self> {
        Ok(Baseline::Model(Box::new(Runner::new(model)?)))
    }
}

/// Scores rows with one model.
pub struct Scorer<'m, 'b, B: Backend> {
    own: Runner<'m, 'b, B>,
    baseline: Baseline<'m, 'b, B>,
    encoder: &'m Encoder<'m>,
    /// Whether distributions are recorded.
    store: bool,
    tag: Option<String>,
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

/// What the baseline says of one text.
enum Theirs<'r, B: Backend> {
    None,
    Stored(&'r Scored),
    Model(&'r Runner<'r, 'r, B>, &'r Hidden<B>),
}

impl<'m, 'b, B: Backend> Scorer<'m, 'b, B> {
    /// A scorer that has seen nothing. `tag` marks what was compared with the baseline.
    pub fn new(
        model: &'m Model<'b, B>,
        baseline: Baseline<'m, 'b, B>,
        encoder: &'m Encoder<'m>,
        store: bool,
        tag: Option<&str>,
    ) -> Result<Self> {
        Ok(Scorer { own: Runner::new(model)?, baseline, encoder, store, tag: tag.map(str::to_owned) })
    }

    /// Tokens that went through the model's layers.
    pub fn computed(&self) -> u64 {
        self.own.computed
    }

    /// Scores a row, or says why it has no score.
    pub fn score(&mut self, input: &Input, item: Item) -> Result<Record> {
        let (texts, gold) = self.texts(item.row, item.content)?;
        let mut record = Record {
            input: input.name.clone(),
            row: item.row,
            gold,
            scores: Vec::new(),
            excluded: None,
            baseline: self.tag.clone(),
        };
        let scores = match texts {
            Ok(texts) => self.scores(input, item.row, texts)?,
            Err(kind) => Err(kind),
        };
        match scores {
            Ok(scores) => record.scores = scores,
            Err(kind) => {
                record.excluded =
                    Some(Exclusion { kind: kind.name().to_owned(), message: kind.to_string(), hint: kind.hint() });
            }
        }
        Ok(record)
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

    fn scores(&mut self, input: &Input, row: u64, texts: Vec<Continuation>) -> Result<Result<Vec<Scored>, FaultKind>> {
        let encoded: Vec<Encoded> = texts.iter().map(|text| text.encoded.clone()).collect();
        let hidden = self.own.run(&encoded)?;
        let (mut record, mut their_hidden) = (None, Vec::new());
        match &mut self.baseline {
            Baseline::None => {}
            Baseline::Stored(stored) => record = stored.get(&input.name, row)?,
            Baseline::Model(theirs) => their_hidden = theirs.run(&encoded)?,
        }
        let mut scores = Vec::with_capacity(texts.len());
        for (i, text) in texts.into_iter().enumerate() {
            let theirs = match (&self.baseline, &record) {
                (Baseline::Model(runner), _) => Theirs::Model(runner, &their_hidden[i]),
                (_, Some(record)) => record.scores.get(i).map_or(Theirs::None, Theirs::Stored),
                _ => Theirs::None,
            };
            match self.scored(&text, &hidden[i], &theirs)? {
                Some(scored) => scores.push(scored),
                None => return Ok(Err(FaultKind::RowNotFinite { row })),
            }
        }
        Ok(Ok(scores))
    }

    /// The score of one text; `None` if a logit is not finite.
    fn scored(&self, text: &Continuation, hidden: &Hidden<B>, theirs: &Theirs<'_, B>) -> Result<Option<Scored>> {
        let (ids, vocab_size) = (&text.encoded.ids[text.encoded.start..], self.encoder.vocab_size as usize);
        let mut scored = Scored {
            logprob: 0.0,
            tokens: ids.len() as u64,
            greedy: true,
            chars: text.chars,
            bytes: text.bytes,
            space: text.space,
            top: Vec::new(),
            against: None,
        };
        let mut against = Against { logprob: 0.0, greedy: true, agreed: 0, kl: Vec::new() };
        let (mut their_logits, mut their_first) = (Vec::new(), 0);
        let mut at = 0;
        while at < ids.len() {
            let logits = self.own.logits(hidden, at)?;
            for logits in logits.chunks_exact(vocab_size) {
                let Some(own) = Distribution::of(logits) else { return Ok(None) };
                let logprob = own.logprob(ids[at]);
                if !logprob.is_finite() {
                    return Ok(None);
                }
                scored.logprob += logprob;
                scored.greedy &= own.best == ids[at];
                if self.store {
                    scored.top.push(own.top(TOP_K));
                }
                if let Theirs::Model(runner, hidden) = theirs {
                    if at >= their_first + their_logits.len() / vocab_size {
                        (their_logits, their_first) = (runner.logits(hidden, at)?, at);
                    }
                    let logits = &their_logits[(at - their_first) * vocab_size..][..vocab_size];
                    compare(&mut against, &own, logits, ids[at]);
                }
                if let Some(top) = stored_top(theirs, at) {
                    against.agreed += u64::from(top.ids.first() == Some(&own.best));
                    against.kl.push(rounded(own.divergence_from_top(top)));
                }
                at += 1;
            }
        }
        if let Theirs::Stored(stored) = theirs {
            (against.logprob, against.greedy) = (stored.logprob, stored.greedy);
        }
        // A baseline without a score, or with another number of tokens, is compared with nothing.
        scored.against = Some(against).filter(|against| against.kl.len() == ids.len());
        Ok(Some(scored))
    }
}

/// Compares with the baseline's logits [V]. Where they are not finite nothing is added.
fn compare(against: &mut Against, own: &Distribution<'_>, logits: &[f32], id: u32) {
    let Some(theirs) = Distribution::of(logits).filter(|theirs| theirs.logprob(id).is_finite()) else { return };
    against.logprob += theirs.logprob(id);
    against.greedy &= theirs.best == id;
    against.agreed += u64::from(theirs.best == own.best);
    against.kl.push(rounded(own.divergence_from(&theirs)));
}

fn stored_top<'r, B: Backend>(theirs: &Theirs<'r, B>, at: usize) -> Option<&'r super::distribution::Top> {
    match theirs {
        Theirs::Stored(scored) => scored.top.get(at),
        _ => None,
    }
}
