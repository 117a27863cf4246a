//! How far backends may be from the reference in tests.

/// Of a product, by the sum of the magnitudes of its terms: four units in the last place. Never by the result, which may be
/// small because terms cancel. Sixteen sums side by side keep the widest rows of GLM-5.2 well below.
pub(crate) const PRODUCT: f64 = 4.0 / (1 << 23) as f64;
/// Of attention, by the largest magnitude of the values that it averages, in units of the product's.
pub(crate) const ATTENTION: f64 = 4.0 * PRODUCT;
/// Of experts, by the sum of the magnitudes of the last product's terms: three products follow each other.
pub(crate) const EXPERTS: f64 = 8.0 * PRODUCT;
/// Of a product of the fast mode, by the sum of the magnitudes of its terms: half a unit in the last place of bf16.
pub(crate) const FAST_PRODUCT: f64 = 1.0 / 256.0;
