use crate::Row;

pub const BAD: &[Row] = &[];

pub const ODD: &[Row] = &[];
