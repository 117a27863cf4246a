//! What rows see of a cache, and the turns of their positions, on the device: made once for all layers of a pass.

use std::sync::{Arc, Mutex};

use super::device::{Device, Pooled};
use super::driver::Driver;
use super::rows::Lists;
use crate::backend::{Places, Rope};
use crate::error::Result;

/// A beginning of a list that is not in memory: 0, 1, 2, ….
const WHOLE: u32 = u32::MAX;

/// What was made last.
#[derive(Debug)]
pub struct Made<D: Driver> {
    seen: Mutex<Option<(Places, Arc<Lists<D>>)>>,
    /// Of the two parts of a layer that are turned.
    turns: Mutex<Vec<Turns<D>>>,
}

/// Frequencies, positions, and their turns.
type Turns<D> = (Rope, Vec<usize>, Arc<Pooled<D>>);

impl<D: Driver> Default for Made<D> {
    fn default() -> Made<D> {
        Made { seen: Mutex::default(), turns: Mutex::default() }
    }
}

/// Kinds of rotation that are kept.
const KEPT_TURNS: usize = 2;

impl<D: Driver> Made<D> {
    /// The rows of the cache that each row sees.
    pub fn seen(&self, device: &Arc<Device<D>>, places: &Places) -> Result<Arc<Lists<D>>> {
        let mut made = self.seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some((of, lists)) = &*made
            && of == places
        {
            return Ok(lists.clone());
        }
        let words = words(places);
        let lists = Arc::new(Lists {
            words: device.words(&words)?,
            rows: places.rows(),
            longest: places.most_seen(),
            count: words.len(),
        });
        *made = Some((places.clone(), lists.clone()));
        Ok(lists)
    }

    /// cos and sin of every pair at every position: [n, pairs, 2].
    pub fn turns(&self, device: &Arc<Device<D>>, rope: &Rope, positions: &[usize]) -> Result<Arc<Pooled<D>>> {
        let mut made = self.turns.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some((.., turns)) = made.iter().find(|(of, at, _)| of == rope && at == positions) {
            return Ok(turns.clone());
        }
        let turn = |position: usize| {
            rope.frequencies.iter().flat_map(move |frequency| {
                let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                [cos as f32, sin as f32]
            })
        };
        let values: Vec<f32> = positions.iter().flat_map(|&position| turn(position)).collect();
        let turns = Arc::new(device.floats(&values)?);
        made.truncate(KEPT_TURNS - 1);
        made.insert(0, (rope.clone(), positions.to_vec(), turns.clone()));
        Ok(turns)
    }
}

/// For each row where its list begins and how long it is, then the lists: one for all rows of a run, each of which sees the
/// beginning of it.
fn words(places: &Places) -> Vec<u32> {
    let seen = places.seen();
    let rows = places.rows();
    let (mut heads, mut lists) = (Vec::with_capacity(2 * rows), Vec::new());
    for (run, path) in seen.runs() {
        let begin = match path.iter().enumerate().all(|(at, &row)| at == row) {
            true => WHOLE,
            false => (2 * rows + lists.len()) as u32,
        };
        if begin != WHOLE {
            lists.extend(path.iter().map(|&row| row as u32));
        }
        let count = path.len() + 1 - run.len();
        heads.extend((0..run.len()).flat_map(|row| [begin, (count + row) as u32]));
    }
    heads.extend(lists);
    heads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_goes_on_needs_no_list() {
        assert_eq!(words(&Places::after(3, 2)), [WHOLE, 4, WHOLE, 5]);
        assert_eq!(words(&Places::after(0, 1)), [WHOLE, 1]);
    }

    #[test]
    fn rows_of_a_run_see_the_beginnings_of_one_list() {
        let mut places = Places::new(4);
        places.add(2, &[0..1, 3..4]);
        places.add(1, &[]);
        assert_eq!(words(&places), [6, 3, 6, 4, 10, 1, 0, 3, 4, 5, 6]);
    }
}
