//! Source element types: stored bytes to f32 rows.
