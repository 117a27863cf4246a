use crate::Row;

pub const INDEX: &[Row] = &[];
