//! Standard errors, intervals and tests.

/// 97.5 % quantile of the normal distribution.
const Z: f64 = 1.959_963_984_540_054;

/// Standard error of the mean of n outcomes of which a share p is 1, as lm-evaluation-harness gives it: the sample standard
/// deviation over √n. `None` for fewer than two.
pub fn proportion_stderr(p: f64, n: u64) -> Option<f64> {
    (n > 1).then(|| (p * (1.0 - p) / (n - 1) as f64).sqrt())
}

/// The 95 % interval of a proportion of n outcomes: E. B. Wilson 1927, without continuity correction.
pub fn wilson(p: f64, n: u64) -> (f64, f64) {
    let n = n as f64;
    let center = (p + Z * Z / (2.0 * n)) / (1.0 + Z * Z / n);
    let half = Z / (1.0 + Z * Z / n) * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
    ((center - half).max(0.0), (center + half).min(1.0))
}

/// The 95 % interval of a difference of two paired proportions, of n pairs of which `gained` are 1 only in the first and
/// `lost` only in the second: D. G. Bonett and R. M. Price 2012, adjusted Wald.
pub fn paired_interval(gained: u64, lost: u64, n: u64) -> (f64, f64) {
    let (gained, lost, n) = (gained as f64 + 1.0, lost as f64 + 1.0, n as f64 + 2.0);
    let (gained, lost) = (gained / n, lost / n);
    let (difference, variance) = (gained - lost, (gained + lost - (gained - lost).powi(2)) / n);
    let half = Z * variance.sqrt();
    ((difference - half).max(-1.0), (difference + half).min(1.0))
}

/// McNemar's exact test: the probability, if neither is better, of discordant pairs at least as uneven as these.
pub fn mcnemar(gained: u64, lost: u64) -> f64 {
    let (n, fewer) = (gained + lost, gained.min(lost));
    if n == 0 {
        return 1.0;
    }
    // ln of C(n, k) / 2ⁿ, from k = 0 on
    let mut term = -(n as f64) * std::f64::consts::LN_2;
    let mut sum = term.exp();
    for k in 1..=fewer {
        term += ((n - k + 1) as f64 / k as f64).ln();
        sum += term.exp();
    }
    (2.0 * sum).min(1.0)
}

/// A ratio of sums over clusters, Σ value / Σ weight, with its standard error (linearized; W. G. Cochran 1977, 6.3).
/// `None` for the error with fewer than two clusters.
pub fn ratio(clusters: impl Iterator<Item = (f64, f64)> + Clone) -> (f64, Option<f64>) {
    let (mut value, mut weight, mut n) = (0.0, 0.0, 0u64);
    for (v, w) in clusters.clone() {
        (value, weight, n) = (value + v, weight + w, n + 1);
    }
    let ratio = value / weight;
    let squares: f64 = clusters.map(|(v, w)| (v - ratio * w).powi(2)).sum();
    (ratio, (n > 1).then(|| (squares * n as f64 / (n - 1) as f64).sqrt() / weight))
}

/// The 95 % interval around a value with this standard error.
pub fn interval(value: f64, stderr: f64) -> (f64, f64) {
    (value - Z * stderr, value + Z * stderr)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 5e-5, "{found} is not {expected}");
    }

    #[test]
    fn published_examples() {
        // R. G. Newcombe 1998: Wilson intervals of 81 of 263 and of 0 of 20.
        let (low, high) = wilson(81.0 / 263.0, 263);
        close(low, 0.2553);
        close(high, 0.3662);
        let (low, high) = wilson(0.0, 20);
        close(low, 0.0);
        close(high, 0.1611);
        close(proportion_stderr(0.45, 60).unwrap(), 0.064768);
        assert_eq!(proportion_stderr(1.0, 1), None);
        // A. Agresti: approval, 150 against 86 discordant of 1600.
        let (low, high) = paired_interval(86, 150, 1600);
        close(low, -0.058723);
        close(high, -0.021177);
        // Exact binomial tails: 2 · (1 + 10 + 45) / 1024, and 2 · (1 + 5) / 32.
        close(mcnemar(2, 8), 0.109375);
        close(mcnemar(4, 1), 0.375);
        assert_eq!((mcnemar(0, 0), mcnemar(3, 3)), (1.0, 1.0));
        assert!(mcnemar(0, 5000) < 1e-300 && mcnemar(2400, 2600) > 0.004);
    }

    #[test]
    fn ratios_of_clusters() {
        let clusters = [(2.0, 1.0), (3.0, 2.0), (7.0, 3.0)];
        let (value, error) = ratio(clusters.into_iter());
        close(value, 2.0);
        // residuals 0, −1, 1
        close(error.unwrap(), (2.0f64 * 3.0 / 2.0).sqrt() / 6.0);
        assert_eq!(ratio([(3.0, 2.0)].into_iter()), (1.5, None));
        let (low, high) = interval(1.0, 0.5);
        close(low, 0.020018);
        close(high, 1.979982);
    }
}
