//! When a generated text ends.

/// A text that ends with so many times the same is a repetition.
pub const REPEATS: usize = 3;
/// Longest period that is looked for, in tokens.
pub const MAX_PERIOD: usize = 256;
/// A repetition that makes up at least so many tokens ends a text: three equal signs are no fault.
pub const MIN_REPEATED: usize = 24;

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum StopReason {
    /// The model said one of its stop ids.
    StopId,
    /// It had as many tokens as it was to have.
    Length,
    /// It repeated itself.
    Repetition,
}

impl StopReason {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The period with which a text ends in a repetition that is long enough to end it: the same [`REPEATS`] times or more, in
/// [`MIN_REPEATED`] tokens or more.
pub fn repetition(ids: &[u32]) -> Option<usize> {
    (1..=MAX_PERIOD).find(|&period| repeated(ids, period) >= MIN_REPEATED.max(REPEATS * period))
}

/// The shortest period with which the text ends at least [`REPEATS`] times, however short that is.
pub fn period(ids: &[u32]) -> Option<usize> {
    (1..=MAX_PERIOD).find(|&period| repeated(ids, period) >= REPEATS * period)
}

/// Tokens at the end that have this period; as many as matter.
fn repeated(ids: &[u32], period: usize) -> usize {
    let n = ids.len();
    let most = MIN_REPEATED.max(REPEATS * period);
    let same = (period..n).rev().take(most).take_while(|&at| ids[at] == ids[at - period]).count();
    if n < period { 0 } else { same + period }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_are_found_with_their_period() {
        assert_eq!(period(&[9, 8, 1, 2, 1, 2, 1, 2]), Some(2));
        assert_eq!(period(&[9, 8, 1, 2, 1, 2, 1]), None);
        assert_eq!(period(&[5, 7, 7, 7]), Some(1));
        assert_eq!((period(&[]), period(&[1]), period(&[1, 2, 3, 4])), (None, None, None));
        let long: Vec<u32> = (0..MAX_PERIOD as u32).cycle().take(REPEATS * MAX_PERIOD).collect();
        assert_eq!(period(&long), Some(MAX_PERIOD));
        assert_eq!(repetition(&long), Some(MAX_PERIOD));
        assert_eq!(repetition(&long[1..]), None);
        assert_eq!(repeated(&[9, 1, 2, 1, 2, 1], 2), 5);
    }

    #[test]
    fn only_long_repetitions_end_a_text() {
        let of = |unit: &[u32], count| -> Vec<u32> { unit.iter().copied().cycle().take(count).collect() };
        assert_eq!(repetition(&of(&[7], 23)), None);
        assert_eq!(repetition(&of(&[7], 24)), Some(1));
        assert_eq!(repetition(&of(&[7, 8], 24)), Some(2));
        assert_eq!(repetition(&of(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 26)), None);
        assert_eq!(repetition(&of(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 27)), Some(9));
        // A short one inside a long one hides nothing.
        assert_eq!(repetition(&of(&[1, 7, 7, 7], 24)), Some(4));
        assert_eq!(repetition(&[&of(&[7], 24)[..], &[1]].concat()), None);
        assert_eq!((StopReason::StopId.name(), StopReason::Repetition.name()), ("stop_id", "repetition"));
    }
}
