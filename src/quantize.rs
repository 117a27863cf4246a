//! Container formats: f32 rows to codes and scales, and back.
