//! One pass over the payload of a stored weight: statistics, and everything that scales and codes can tell.

use rayon::prelude::*;

use crate::container::reader::{Found, Survey};
use crate::error::{Fault, FaultKind, Place, Result, Severity};
use crate::format::Format;
use crate::limits;
use crate::tensor::TensorName;
use crate::weights::{ContainerRows, ReadBuffer, Rows, RowsBuffer, SourceRows, StoredRows};

/// How often something was seen, and where first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seen<T> {
    /// How often.
    pub count: u64,
    /// The first, in the order of rows and columns.
    pub first: T,
}

/// Adds a sighting, or many that come after the known ones.
fn see<T>(seen: &mut Option<Seen<T>>, more: Option<Seen<T>>) {
    if let Some(more) = more {
        match seen {
            Some(seen) => seen.count += more.count,
            None => *seen = Some(more),
        }
    }
}

/// What a pass over a weight found.
#[derive(Debug, Clone, PartialEq)]
pub struct Scan {
    /// Rows scanned; a vector is one row.
    pub rows: u64,
    /// Elements of a row.
    pub columns: u64,
    /// Smallest finite value.
    pub min: f32,
    /// Largest finite value.
    pub max: f32,
    /// Sum of the finite values.
    pub sum: f64,
    /// Sum of their squares.
    pub sum_squares: f64,
    /// Values that are NaN or infinite: row, column, value.
    pub non_finite: Option<Seen<(u64, u64, f32)>>,
    /// Rows that are zero throughout.
    pub zero_rows: Option<Seen<u64>>,
    /// Scales.
    pub scales: u64,
    /// Smallest finite scale.
    pub scale_min: f32,
    /// Largest finite scale.
    pub scale_max: f32,
    /// Scales that are not positive and finite: index, row, value.
    pub bad_scales: Option<Seen<(u64, u64, f32)>>,
    /// How often each level was seen, by level + 128; none for formats without levels.
    pub levels: Option<Box<[u64; 256]>>,
    /// Levels below the range that a symmetric quantizer writes: level, row.
    pub unusual: Option<Seen<(i8, u64)>>,
    /// Rows whose padding is not what the format demands.
    pub padding: Option<Seen<u64>>,
    /// Zero elements in the left half of the columns and in the right.
    pub zeros: [u64; 2],
}

impl Scan {
    fn new(rows: &ContainerRows<'_>) -> Scan {
        Scan::empty(rows.columns, rows.decoder().code_range().is_some())
    }

    fn empty(columns: u64, has_levels: bool) -> Scan {
        Scan {
            rows: 0,
            columns,
            min: f32::INFINITY,
            max: f32::NEG_INFINITY,
            sum: 0.0,
            sum_squares: 0.0,
            non_finite: None,
            zero_rows: None,
            scales: 0,
            scale_min: f32::INFINITY,
            scale_max: f32::NEG_INFINITY,
            bad_scales: None,
            levels: has_levels.then(|| Box::new([0; 256])),
            unusual: None,
            padding: None,
            zeros: [0; 2],
        }
    }

    /// Elements.
    pub fn elements(&self) -> u64 {
        self.rows * self.columns
    }

    /// Share of elements at the largest or smallest level that a symmetric quantizer writes.
    pub fn clip_share(&self, (low, high): (i8, i8)) -> Option<f64> {
        let levels = self.levels.as_ref()?;
        let at = |level: i8| levels[(i16::from(level) + 128) as usize];
        Some((at(low) + at(high)) as f64 / self.elements().max(1) as f64)
    }

    /// Columns of a half that is zero while the other is not: one element in 100 may differ.
    pub fn zero_half(&self) -> Option<(u64, u64)> {
        const NEARLY_ALL: f64 = 0.99;
        const NOT_ALL: f64 = 0.9;
        let half = self.columns / 2;
        if half == 0 || self.rows == 0 {
            return None;
        }
        let widths = [half, self.columns - half];
        let share = |side: usize| self.zeros[side] as f64 / (self.rows * widths[side]) as f64;
        match (share(0), share(1)) {
            (left, right) if left >= NEARLY_ALL && right < NOT_ALL => Some((0, half)),
            (left, right) if right >= NEARLY_ALL && left < NOT_ALL => Some((half, self.columns)),
            _ => None,
        }
    }

    /// Joins the scan of the rows that follow.
    fn join(&mut self, next: Scan) {
        self.rows += next.rows;
        self.min = self.min.min(next.min);
        self.max = self.max.max(next.max);
        self.sum += next.sum;
        self.sum_squares += next.sum_squares;
        self.scales += next.scales;
        self.scale_min = self.scale_min.min(next.scale_min);
        self.scale_max = self.scale_max.max(next.scale_max);
        see(&mut self.non_finite, next.non_finite);
        see(&mut self.zero_rows, next.zero_rows);
        see(&mut self.bad_scales, next.bad_scales);
        see(&mut self.unusual, next.unusual);
        see(&mut self.padding, next.padding);
        if let (Some(levels), Some(more)) = (&mut self.levels, &next.levels) {
            levels.iter_mut().zip(more.iter()).for_each(|(count, more)| *count += more);
        }
        self.zeros = [self.zeros[0] + next.zeros[0], self.zeros[1] + next.zeros[1]];
    }

    fn values(&mut self, row: u64, values: &[f32]) {
        let zeros = if values.iter().fold(true, |all, value| all & value.is_finite()) {
            let (left, right) = values.split_at(values.len() / 2);
            [self.finite(left), self.finite(right)]
        } else {
            self.with_non_finite(row, values)
        };
        self.zeros = [self.zeros[0] + zeros[0], self.zeros[1] + zeros[1]];
        if zeros[0] + zeros[1] == values.len() as u64 && !values.is_empty() {
            see(&mut self.zero_rows, Some(Seen { count: 1, first: row }));
        }
    }

    /// Adds finite values, in lanes that need not wait for each other, and counts the zeros among them.
    fn finite(&mut self, values: &[f32]) -> u64 {
        const LANES: usize = 8;
        let mut least = [f32::INFINITY; LANES];
        let mut most = [f32::NEG_INFINITY; LANES];
        let (mut sums, mut squares, mut zeros) = ([0f64; LANES], [0f64; LANES], [0u32; LANES]);
        let mut one = |lane: usize, value: f32| {
            least[lane] = if value < least[lane] { value } else { least[lane] };
            most[lane] = if value > most[lane] { value } else { most[lane] };
            zeros[lane] += u32::from(value == 0.0);
            let value = f64::from(value);
            sums[lane] += value;
            squares[lane] += value * value;
        };
        let (chunks, rest) = values.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, &value) in chunk.iter().enumerate() {
                one(lane, value);
            }
        }
        for (lane, &value) in rest.iter().enumerate() {
            one(lane, value);
        }
        self.min = least.into_iter().fold(self.min, f32::min);
        self.max = most.into_iter().fold(self.max, f32::max);
        self.sum += sums.iter().sum::<f64>();
        self.sum_squares += squares.iter().sum::<f64>();
        zeros.into_iter().map(u64::from).sum()
    }

    /// Adds values one at a time; those that are not finite are counted apart. Zeros of either half are counted.
    fn with_non_finite(&mut self, row: u64, values: &[f32]) -> [u64; 2] {
        let half = values.len() / 2;
        let mut zeros = [0; 2];
        for (column, &value) in values.iter().enumerate() {
            if value.is_finite() {
                zeros[usize::from(column >= half)] += self.finite(&[value]);
            } else {
                see(&mut self.non_finite, Some(Seen { count: 1, first: (row, column as u64, value) }));
            }
        }
        zeros
    }

    fn scales(&mut self, row: u64, scales: &[f32]) {
        for (i, &scale) in scales.iter().enumerate() {
            let index = row * scales.len() as u64 + i as u64;
            if scale.is_finite() && scale > 0.0 {
                self.scale_min = self.scale_min.min(scale);
                self.scale_max = self.scale_max.max(scale);
            } else {
                see(&mut self.bad_scales, Some(Seen { count: 1, first: (index, row, scale) }));
            }
        }
        self.scales += scales.len() as u64;
    }

    fn codes(&mut self, row: u64, levels: &[i8], range: (i8, i8)) {
        if levels.iter().fold(i8::MAX, |least, &level| least.min(level)) >= range.0 {
            return;
        }
        for &level in levels.iter().filter(|level| **level < range.0) {
            see(&mut self.unusual, Some(Seen { count: 1, first: (level, row) }));
        }
    }
}

/// Counts of levels, in several tables in turn: a level that comes twice in a row need not wait for itself.
struct Histogram([[u32; 256]; 4]);

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram([[0; 256]; 4])
    }
}

impl Histogram {
    fn add(&mut self, levels: &[i8]) {
        let place = |level: i8| (level.cast_unsigned() ^ 0x80) as usize;
        let (chunks, rest) = levels.as_chunks::<4>();
        for chunk in chunks {
            for (table, &level) in self.0.iter_mut().zip(chunk) {
                table[place(level)] += 1;
            }
        }
        for &level in rest {
            self.0[0][place(level)] += 1;
        }
    }

    /// Moves the counts over, as level + 128.
    fn drain(&mut self, levels: &mut [u64; 256]) {
        for table in &mut self.0 {
            levels.iter_mut().zip(std::mem::replace(table, [0; 256])).for_each(|(sum, count)| *sum += u64::from(count));
        }
    }
}

/// Scans a weight, blocks of rows in parallel; the result does not depend on the number of threads.
pub fn scan(rows: &ContainerRows<'_>) -> Result<Scan> {
    let step = (limits::BLOCK_SOURCE_BYTES / rows.row_bytes().max(1)).max(1);
    let starts: Vec<u64> = (0..rows.rows).step_by(step as usize).collect();
    let blocks: Vec<Result<Scan>> = starts
        .into_par_iter()
        .map_init(Default::default, |buffers, first| scan_block(rows, first, step.min(rows.rows - first), buffers))
        .collect();
    let mut whole = Scan::new(rows);
    for block in blocks {
        whole.join(block?);
    }
    Ok(whole)
}

/// One thread's reused space.
type Buffers = (StoredRows, Vec<f32>, Vec<i8>, Histogram);

fn scan_block(rows: &ContainerRows<'_>, first: u64, count: u64, buffers: &mut Buffers) -> Result<Scan> {
    let (stored, values, levels, histogram) = buffers;
    let columns = rows.columns as usize;
    let decoder = rows.decoder();
    let mut scan = Scan::new(rows);
    values.resize(columns, 0.0);
    levels.resize(columns, 0);
    rows.read(first, count, stored)?;
    for row in first..first + count {
        rows.row(stored, first, row, values);
        scan.values(row, values);
        if decoder.format() == Format::F32 {
            continue;
        }
        let codes = rows.codes(stored, first, row);
        // The scales of fp8 blocks are shared: count them with the first row of each.
        if rows.row_scales() > 0 || row % crate::format::FP8_BLOCK == 0 {
            scan.scales(row, rows.scales(stored, first, row));
        }
        if decoder.codes_row(codes, levels) {
            histogram.add(levels);
            scan.codes(row, levels, decoder.code_range().unwrap_or((i8::MIN, i8::MAX)));
        }
        if !decoder.padding_ok(codes, columns) {
            see(&mut scan.padding, Some(Seen { count: 1, first: row }));
        }
    }
    if let Some(levels) = &mut scan.levels {
        histogram.drain(levels);
    }
    scan.rows = count;
    Ok(scan)
}

/// Scans the values of a source weight; it has neither levels nor scales of its own.
pub fn scan_source(rows: &SourceRows<'_>) -> Result<Scan> {
    let step = (limits::BLOCK_SOURCE_BYTES / rows.row_bytes().max(1)).max(1);
    let starts: Vec<u64> = (0..rows.rows).step_by(step as usize).collect();
    let blocks: Vec<Result<Scan>> = starts
        .into_par_iter()
        .map_init(Default::default, |(buffer, values): &mut (ReadBuffer, Vec<f32>), first| {
            let count = step.min(rows.rows - first);
            let mut scan = Scan { rows: count, ..Scan::empty(rows.columns, false) };
            values.resize(rows.columns as usize, 0.0);
            rows.read(first, count, buffer)?;
            for row in first..first + count {
                rows.row(buffer, first, row, values);
                scan.values(row, values);
            }
            Ok(scan)
        })
        .collect();
    let mut whole = Scan::empty(rows.columns, false);
    for block in blocks {
        whole.join(block?);
    }
    Ok(whole)
}

/// How many values of a weight fall into each of `bins` equal steps from `min` to `max`.
pub fn histogram(rows: &Rows<'_>, min: f32, max: f32, bins: usize) -> Result<Vec<u64>> {
    let (count, columns) = rows.dims();
    let width = (f64::from(max) - f64::from(min)).max(f64::MIN_POSITIVE);
    let step = (limits::BLOCK_SOURCE_BYTES / rows.row_bytes().max(1)).max(1);
    let starts: Vec<u64> = (0..count).step_by(step as usize).collect();
    let blocks: Vec<Result<Vec<u64>>> = starts
        .into_par_iter()
        .map_init(Default::default, |(buffer, values): &mut (RowsBuffer, Vec<f32>), first| {
            let mut counts = vec![0; bins];
            values.resize(columns as usize, 0.0);
            let some = step.min(count - first);
            rows.read(first, some, buffer)?;
            for row in first..first + some {
                rows.row(buffer, first, row, values);
                for value in values.iter().filter(|value| value.is_finite()) {
                    let bin = (f64::from(*value) - f64::from(min)) / width * bins as f64;
                    counts[(bin as usize).min(bins - 1)] += 1;
                }
            }
            Ok(counts)
        })
        .collect();
    let mut total = vec![0; bins];
    for block in blocks {
        total.iter_mut().zip(block?).for_each(|(total, more)| *total += more);
    }
    Ok(total)
}

/// What a scan says about a weight at `place`.
pub fn findings(scan: &Scan, format: Format, place: &Place) -> Vec<Found> {
    let mut found = Vec::new();
    let mut push = |severity, kind| found.push((severity, Fault::new(place.clone(), kind)));
    if let Some(Seen { count, first: (index, row, value) }) = scan.bad_scales {
        push(Severity::Error, FaultKind::BadScale { index, row, value, count });
    }
    if let Some(Seen { count, first: (row, column, value) }) = scan.non_finite.filter(|_| scan.bad_scales.is_none()) {
        push(Severity::Error, FaultKind::BadValue { row, column, value, count });
    }
    if let Some(Seen { count, first: row }) = scan.padding {
        push(Severity::Error, FaultKind::Padding { format, columns: scan.columns, count, row });
    }
    if let Some((begin, end)) = scan.zero_half() {
        push(Severity::Warning, FaultKind::ZeroColumns { begin, end });
    }
    if let Some(Seen { count, first: row }) = scan.zero_rows.filter(|_| format != Format::F32) {
        push(Severity::Warning, FaultKind::ZeroRows { count, row });
    }
    if let Some(Seen { count, first: (code, row) }) = scan.unusual {
        push(Severity::Warning, FaultKind::UnusualCode { code, count, row });
    }
    found
}

/// The MTP head's `eh_proj` with half of its columns rounded to zero is what makes every draft wrong. It is one small
/// matrix, so it is looked at whenever a container is.
pub fn check_head(survey: &Survey) -> Option<Found> {
    let layer = survey.config.as_ref()?.mtp_layer()?;
    let name = TensorName::from(format!("model.layers.{layer}.eh_proj.weight"));
    let weight = survey.weights.get(&name)?;
    let format = weight.format?;
    let place = Place::tensor(survey.files[weight.file].file.path(), name);
    let scanned = ContainerRows::new(survey, weight).and_then(|rows| scan(&rows));
    match scanned {
        Ok(scan) => {
            let (begin, end) = scan.zero_half()?;
            Some((Severity::Error, Fault::new(place, FaultKind::HeadHalfZero { format, begin, end })))
        }
        Err(fault) => Some((Severity::Error, fault)),
    }
}
