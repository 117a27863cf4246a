//! What a template may make. Steps alone are no bound: a text that is doubled in each has 2^steps bytes.
//!
//! So bytes are counted like steps. All that a template makes, by operators, filters, methods, and by what it prints, is
//! paid for before it is there, and a template that has used up its bytes ends. What is made of lists within lists counts
//! as often as it would be written out, so no single operation can make much of little. What operations look through is
//! counted likewise: their number is no bound on their time.

use std::cell::Cell;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use crate::limits;

/// Bytes that a value takes beside its text.
const VALUE_BYTES: u64 = 64;

thread_local! {
    /// Bytes that the template may make that this thread renders.
    static ALL: Cell<u64> = const { Cell::new(0) };
    /// What is left of them.
    static LEFT: Cell<u64> = const { Cell::new(0) };
    /// Bytes that operators, filters and methods may still look through.
    static UNREAD: Cell<u64> = const { Cell::new(0) };
}

/// How often what a template may make can be looked through, in whole.
const READINGS: u64 = 16;

/// Begins anew, with so many bytes.
pub(super) fn begin(bytes: u64) {
    ALL.set(bytes);
    LEFT.set(bytes);
    UNREAD.set(bytes.saturating_mul(READINGS));
}

/// Pays for bytes that are about to be made.
pub(super) fn pay(bytes: u64) -> Result<(), Error> {
    LEFT.set(LEFT.get().checked_sub(bytes).ok_or_else(too_much)?);
    Ok(())
}

fn too_much() -> Error {
    let message = format!("it makes more than {} bytes of text", ALL.get());
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Pays for a value that was made.
pub(super) fn made(value: Value) -> Result<Value, Error> {
    pay(weight(&value)?)?;
    Ok(value)
}

/// Bytes of a value written out, about; refused where they are more than could be made, or where it nests too deep. They
/// are paid for as looked through: a step that makes nothing may take long.
pub(super) fn weight(value: &Value) -> Result<u64, Error> {
    let mut bytes = 0;
    weigh(value, 0, &mut bytes)?;
    let unread = UNREAD.get().checked_sub(bytes).ok_or_else(|| {
        let message = format!("it looks through more than {} bytes", ALL.get().saturating_mul(READINGS));
        Error::new(ErrorKind::InvalidOperation, message)
    })?;
    UNREAD.set(unread);
    Ok(bytes)
}

fn weigh(value: &Value, depth: usize, bytes: &mut u64) -> Result<(), Error> {
    check_depth(depth)?;
    *bytes += VALUE_BYTES + value.as_str().map_or(0, |text| text.len() as u64);
    if *bytes > ALL.get() {
        return Err(too_much());
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => value.try_iter()?.try_for_each(|item| weigh(&item, depth + 1, bytes)),
        ValueKind::Map => value.try_iter()?.try_for_each(|key| {
            weigh(&key, depth + 1, bytes)?;
            weigh(&value.get_item(&key)?, depth + 1, bytes)
        }),
        _ => Ok(()),
    }
}

/// Refuses what nests too deep.
fn check_depth(depth: usize) -> Result<(), Error> {
    match depth <= limits::MAX_TEMPLATE_DEPTH {
        true => Ok(()),
        false => {
            let message = format!("a value nests more than {} deep", limits::MAX_TEMPLATE_DEPTH);
            Err(Error::new(ErrorKind::InvalidOperation, message))
        }
    }
}

/// A text that is being made.
#[derive(Default)]
pub(super) struct Text {
    text: String,
}

impl Text {
    pub(super) fn push(&mut self, text: &str) -> Result<(), Error> {
        pay(text.len() as u64)?;
        self.text.push_str(text);
        Ok(())
    }

    /// So many blanks.
    pub(super) fn blanks(&mut self, count: usize) -> Result<(), Error> {
        pay(count as u64)?;
        self.text.extend(std::iter::repeat_n(' ', count));
        Ok(())
    }

    pub(super) fn check_depth(&self, depth: usize) -> Result<(), Error> {
        check_depth(depth)
    }

    pub(super) fn into_text(self) -> String {
        self.text
    }
}
