use crate::Row;

pub const STAMPS: &[Row] = &[];

pub const MANIFEST: &[Row] = &[];
