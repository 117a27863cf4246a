//! Where the rows that go through the layers together stand in their texts, and what of a cache each of them sees.

use std::ops::Range;
use std::sync::OnceLock;

/// The places of n rows, which a cache keeps one after the other from [`Places::first`] on.
///
/// Rows come in runs of tokens that follow one another. A row sees what stands before its run, which may lie in several
/// stretches of the cache, then the rows of its run up to itself. So several texts, or several ways on from one text, can
/// share one cache and go through the layers together without seeing each other.
#[derive(Debug, Clone)]
pub struct Places {
    first: usize,
    rows: usize,
    runs: Vec<Run>,
    /// What follows from these, made when the first layer asks for it.
    positions: OnceLock<Vec<usize>>,
    seen: OnceLock<Seen>,
}

impl PartialEq for Places {
    fn eq(&self, other: &Places) -> bool {
        (self.first, self.rows, &self.runs) == (other.first, other.rows, &other.runs)
    }
}

impl Eq for Places {}

/// Rows that follow one another.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    /// Of all rows.
    rows: Range<usize>,
    /// Rows of the cache that stand before the run, in the order of the text.
    before: Vec<Range<usize>>,
    /// How many these are: the position of the run's first row.
    position: usize,
}

impl Places {
    /// No rows yet, behind `first` rows of a cache.
    pub fn new(first: usize) -> Places {
        Places { first, rows: 0, runs: Vec::new(), positions: OnceLock::new(), seen: OnceLock::new() }
    }

    /// The `rows` rows that follow all `first` rows of a cache.
    pub fn after(first: usize, rows: usize) -> Places {
        let mut places = Places::new(first);
        let whole = 0..first;
        places.add(rows, if first == 0 { &[] } else { std::slice::from_ref(&whole) });
        places
    }

    /// Adds a run. `before` are the rows of the cache that stand before it, in the order of the text.
    pub fn add(&mut self, rows: usize, before: &[Range<usize>]) {
        let position = before.iter().map(ExactSizeIterator::len).sum();
        debug_assert!(before.iter().all(|range| range.end <= self.first + self.rows), "what is seen comes before");
        self.runs.push(Run { rows: self.rows..self.rows + rows, before: before.to_vec(), position });
        self.rows += rows;
        (self.positions, self.seen) = (OnceLock::new(), OnceLock::new());
    }

    /// Rows of the cache before the first of these.
    pub fn first(&self) -> usize {
        self.first
    }

    /// How many rows these are.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The position of each row in its text.
    pub fn positions(&self) -> &[usize] {
        let of_run = |run: &Run| run.position..run.position + run.rows.len();
        self.positions.get_or_init(|| self.runs.iter().flat_map(of_run).collect())
    }

    /// Panics unless these are the last rows of a cache, and as many as the queries: then the caller is wrong.
    pub(super) fn check(&self, cached: usize, queries: usize) {
        assert_eq!((self.first + self.rows, self.rows), (cached, queries), "places of rows");
    }

    /// The most rows that any of these sees, itself included.
    pub fn most_seen(&self) -> usize {
        self.runs.iter().map(|run| run.position + run.rows.len()).max().unwrap_or(0)
    }

    /// The rows of the cache that each row sees.
    pub fn seen(&self) -> &Seen {
        self.seen.get_or_init(|| self.see())
    }

    fn see(&self) -> Seen {
        let whole = |run: &Run| {
            let own = self.first + run.rows.start..self.first + run.rows.end;
            run.before.iter().cloned().chain([own]).flatten().collect()
        };
        let counts = |(number, run): (usize, &Run)| {
            let position = run.position;
            (1..=run.rows.len()).map(move |count| (number, position + count))
        };
        Seen {
            runs: self.runs.iter().map(whole).collect(),
            rows: self.runs.iter().enumerate().flat_map(counts).collect(),
        }
    }
}

/// What each of some rows sees of a cache. Rows of a run see what the row before them sees, and themselves.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Of each run what its last row sees: the others see the beginning of it.
    runs: Vec<Vec<usize>>,
    /// Of each row its run, and how many it sees.
    rows: Vec<(usize, usize)>,
}

impl Seen {
    /// Rows of the cache in the order of the text; the last is the row itself.
    pub fn row(&self, row: usize) -> &[usize] {
        let (run, count) = self.rows[row];
        &self.runs[run][..count]
    }

    /// The rows of each run, and what the last of them sees.
    pub fn runs(&self) -> impl Iterator<Item = (Range<usize>, &[usize])> {
        let mut first = 0;
        self.runs.iter().enumerate().map(move |(number, path)| {
            let rows = self.rows[first..].iter().take_while(|(run, _)| *run == number).count();
            first += rows;
            (first - rows..first, &path[..])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_seen(places: &Places) -> Vec<Vec<usize>> {
        let seen = places.seen();
        (0..places.rows()).map(|row| seen.row(row).to_vec()).collect()
    }

    #[test]
    fn a_text_that_goes_on_sees_all_before() {
        let places = Places::after(2, 3);
        assert_eq!((places.first(), places.rows(), places.most_seen()), (2, 3, 5));
        assert_eq!(places.positions(), [2, 3, 4]);
        assert_eq!(all_seen(&places), [vec![0, 1, 2], vec![0, 1, 2, 3], vec![0, 1, 2, 3, 4]]);
        assert_eq!(all_seen(&Places::after(0, 1)), [[0]]);
    }

    #[test]
    fn runs_do_not_see_each_other() {
        let mut places = Places::new(4);
        // A text of its own, a way on from rows 0 and 1, and a way on from what the first run added.
        places.add(2, &[]);
        places.add(1, &[0..1, 1..2]);
        places.add(2, &[0..1, 3..4, 4..5]);
        assert_eq!(places.positions(), [0, 1, 2, 3, 4]);
        assert_eq!(all_seen(&places), [vec![4], vec![4, 5], vec![0, 1, 6], vec![0, 3, 4, 7], vec![0, 3, 4, 7, 8]]);
        assert_eq!((places.rows(), places.most_seen()), (5, 5));
        let seen = places.seen();
        let runs: Vec<(Range<usize>, &[usize])> = seen.runs().collect();
        assert_eq!(runs, [(0..2, &[4, 5][..]), (2..3, &[0, 1, 6]), (3..5, &[0, 3, 4, 7, 8])]);
    }
}
