//! How many texts go through the layers together: what several begin with goes through once.

use std::collections::HashMap;
use std::ops::Range;

use super::encode::Encoded;
use crate::backend::Places;

/// A token whose probability a text wants to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask {
    /// Which text.
    pub text: usize,
    /// Which of its scored tokens, from 0.
    pub at: usize,
    /// The token.
    pub id: u32,
}

/// Rows of a cache for all texts, each token behind what stands before it in a text.
#[derive(Debug)]
pub struct Plan {
    /// Rows that the cache has already.
    kept: usize,
    /// The tokens after these.
    ids: Vec<u32>,
    /// Tokens that follow one another: how many, and the rows before them.
    runs: Vec<(usize, Vec<Range<usize>>)>,
    /// For each of these tokens what is asked after it.
    asks: Vec<Vec<Ask>>,
}

/// The row before the first one.
const ROOT: usize = usize::MAX;

impl Plan {
    /// A plan for a cache that has the beginning of one text, `kept`.
    ///
    /// # Panics
    ///
    /// If something is asked after a row that is kept: see [`keepable`].
    pub fn new(kept: &[u32], texts: &[Encoded]) -> Plan {
        let mut plan = Plan { kept: kept.len(), ids: Vec::new(), runs: Vec::new(), asks: Vec::new() };
        let mut rows: HashMap<(usize, u32), usize> = HashMap::new();
        let mut last = ROOT;
        for (row, &id) in kept.iter().enumerate() {
            rows.insert((last, id), row);
            last = row;
        }
        for (number, text) in texts.iter().enumerate() {
            plan.add(number, text, &mut rows);
        }
        plan
    }

    fn add(&mut self, number: usize, text: &Encoded, rows: &mut HashMap<(usize, u32), usize>) {
        let (mut last, mut before, mut new) = (ROOT, Vec::<Range<usize>>::new(), 0);
        // The last token is asked for and goes through no layer.
        for (position, pair) in text.ids.windows(2).enumerate() {
            let next = self.kept + self.ids.len();
            let row = *rows.entry((last, pair[0])).or_insert(next);
            if row == next {
                self.ids.push(pair[0]);
                self.asks.push(Vec::new());
                new += 1;
            } else {
                match before.last_mut().filter(|range| range.end == row) {
                    Some(range) => range.end += 1,
                    None => before.push(row..row + 1),
                }
            }
            if position + 1 >= text.start {
                let ask = Ask { text: number, at: position + 1 - text.start, id: pair[1] };
                self.asks[row - self.kept].push(ask);
            }
            last = row;
        }
        if new > 0 {
            self.runs.push((new, before));
        }
    }

    /// The text that a cache then holds from its first row on, of those the plan was made of.
    pub fn held(&self, kept: &[u32]) -> Vec<u32> {
        let mut held = kept.to_vec();
        if let Some((rows, before)) = self.runs.first() {
            // The first run goes on where the kept rows end, or begins a text of its own.
            let behind: usize = before.iter().map(ExactSizeIterator::len).sum();
            held.extend_from_slice(if behind == self.kept { &self.ids[..*rows] } else { &[] });
        }
        held
    }

    /// The pieces that go through the layers one after the other: at most `rows` tokens each.
    pub fn pieces(&self, rows: usize) -> Vec<Piece<'_>> {
        let mut pieces = Vec::new();
        let (mut run, mut done) = (0, 0);
        for first in (0..self.ids.len()).step_by(rows) {
            let end = self.ids.len().min(first + rows);
            let mut places = Places::new(self.kept + first);
            while places.rows() < end - first {
                let (count, before) = &self.runs[run];
                let taken = (count - done).min(end - first - places.rows());
                let mut before = before.clone();
                if done > 0 {
                    let next = self.kept + first + places.rows();
                    before.push(next - done..next);
                }
                places.add(taken, &before);
                done += taken;
                if done == *count {
                    (run, done) = (run + 1, 0);
                }
            }
            pieces.push(Piece { ids: &self.ids[first..end], places, asks: &self.asks[first..end] });
        }
        pieces
    }
}

/// Tokens that go through the layers together.
#[derive(Debug)]
pub struct Piece<'p> {
    /// The tokens.
    pub ids: &'p [u32],
    /// Where they stand.
    pub places: Places,
    /// What is asked after each.
    pub asks: &'p [Vec<Ask>],
}

/// How many tokens of a text that a cache holds are kept for others: as many as the longest common beginning, but none
/// after which something is asked.
pub fn keepable(held: &[u32], texts: &[Encoded]) -> usize {
    let common = |text: &Encoded| held.iter().zip(&text.ids).take_while(|(a, b)| a == b).count();
    let longest = texts.iter().map(common).max().unwrap_or(0);
    texts.iter().filter(|text| common(text) >= text.start).map(|text| text.start - 1).fold(longest, usize::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(ids: &[u32], start: usize) -> Encoded {
        Encoded { ids: ids.to_vec(), start }
    }

    #[test]
    fn what_texts_begin_with_goes_through_once() {
        let texts = [text(&[1, 2, 3, 4, 5], 3), text(&[1, 2, 3, 9], 3), text(&[1, 2, 3, 4, 6, 7], 3), text(&[8, 9], 1)];
        let plan = Plan::new(&[], &texts);
        assert_eq!(plan.ids, [1, 2, 3, 4, 6, 8]);
        let whole = std::iter::once(0..4).collect();
        assert_eq!(plan.runs, [(4, vec![]), (1, whole), (1, vec![])]);
        let ask = |text, at, id| Ask { text, at, id };
        assert_eq!(plan.asks[2], [ask(0, 0, 4), ask(1, 0, 9), ask(2, 0, 4)]);
        assert_eq!(plan.asks[3], [ask(0, 1, 5), ask(2, 1, 6)]);
        assert_eq!((&plan.asks[4][..], &plan.asks[5][..]), (&[ask(2, 2, 7)][..], &[ask(3, 0, 9)][..]));
        assert!(plan.asks[..2].iter().all(Vec::is_empty));
    }

    #[test]
    fn pieces_are_cut_anywhere() {
        let texts = [text(&[1, 2, 3, 4, 5], 3), text(&[1, 2, 6, 7, 8, 9], 3)];
        let plan = Plan::new(&[1], &texts);
        let whole = &plan.pieces(100)[0];
        assert_eq!(whole.ids, [2, 3, 4, 6, 7, 8]);
        assert_eq!(whole.places.positions(), [1, 2, 3, 2, 3, 4]);
        let all: Vec<Vec<usize>> = (0..6).map(|row| whole.places.seen().row(row).to_vec()).collect();
        for rows in 1..6 {
            let mut seen = Vec::new();
            for piece in plan.pieces(rows) {
                assert!(piece.ids.len() <= rows && piece.asks.len() == piece.ids.len());
                seen.extend((0..piece.ids.len()).map(|row| piece.places.seen().row(row).to_vec()));
            }
            assert_eq!(seen, all, "{rows}");
        }
    }

    #[test]
    fn rows_that_are_asked_after_are_not_kept() {
        let held = [1, 2, 3, 4, 5];
        assert_eq!(keepable(&held, &[text(&[1, 2, 3, 9, 9], 4), text(&[1, 7, 7], 2)]), 3);
        assert_eq!(keepable(&held, &[text(&[1, 2, 3, 9, 9], 3)]), 2);
        assert_eq!(keepable(&held, &[text(&[1, 2, 3, 4, 5, 6], 5), text(&[1, 2, 8], 1)]), 0);
        assert_eq!((keepable(&held, &[text(&[9, 2], 1)]), keepable(&[], &[text(&[9, 2], 1)])), (0, 0));
        assert_eq!(keepable(&held, &[text(&[1, 2, 3, 4, 5, 6], 5), text(&[1, 2, 8, 8], 3)]), 4);
    }
}
