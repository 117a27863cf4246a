use crate::Row;

pub const CENSUS: &[Row] = &[];

pub const BYTES: &[Row] = &[];
