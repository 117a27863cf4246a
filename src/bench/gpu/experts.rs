//! Routed experts of GLM-5.2's shapes: one projection of those that rows choose, and all of it.

use super::products::{divisor, stored_bytes};
use super::{Amount, Bench, READ, Work};
use crate::backend::gpu::driver::Driver;
use crate::backend::gpu::{Choice, Experts, Groups, Rows};
use crate::backend::{Backend, ExpertSource, Routed};
use crate::bench::kernels::{Random, name_of, numbers};
use crate::error::{Faults, Result};
use crate::format::Format;
use crate::report::BenchMeasure;
use crate::roles::Projection;
use crate::weights::Matrix;

/// An expert's inner width, and the model's.
const INNER: usize = 2048;
const HIDDEN: usize = 6144;
/// Experts that a row chooses.
const CHOSEN: usize = 8;
/// Experts of a layer.
const LEAST_EXPERTS: u64 = 16;
const MOST_EXPERTS: u64 = 256;

const FORMATS: [Format; 6] = [
    Format::F32,
    Format::Int8Row,
    Format::Fp8E4m3B128,
    Format::Int4Row,
    Format::Int4Grouped { group_size: 64 },
    Format::Int3G64,
];

/// What rows choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Case {
    /// One row.
    One,
    /// Eight rows, each others as far as there are any.
    Others,
    /// Eight rows, all the same.
    Same,
}

impl Case {
    const ALL: [Case; 3] = [Case::One, Case::Others, Case::Same];

    fn name(self) -> &'static str {
        match self {
            Case::One => "1 row",
            Case::Others => "8 rows, 8 experts each",
            Case::Same => "8 rows, the same 8 experts",
        }
    }

    fn rows(self) -> usize {
        if self == Case::One { 1 } else { 8 }
    }

    /// Choices one after the other, until every one of `count` experts, a multiple of 8, was chosen.
    fn choices(self, count: usize) -> Vec<Vec<Vec<Routed>>> {
        let step = if self == Case::Others { CHOSEN * self.rows() } else { CHOSEN };
        let row = |first: usize| (first..first + CHOSEN).map(|expert| (expert % count, 1.0 / CHOSEN as f32)).collect();
        let choice = |first: usize| match self {
            Case::Others => (0..self.rows()).map(|number| row(first + number * CHOSEN)).collect(),
            Case::One | Case::Same => vec![row(first); self.rows()],
        };
        (0..count).step_by(step).map(choice).collect()
    }
}

/// Experts that one choice chooses.
fn distinct(choice: &[Vec<Routed>]) -> u64 {
    let mut experts: Vec<usize> = choice.iter().flatten().map(|&(expert, _)| expert).collect();
    experts.sort_unstable();
    experts.dedup();
    experts.len() as u64
}

/// What is done with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Gate,
    Down,
    Whole,
}

/// A layer of experts, all of them with the same numbers at different places.
struct Layer {
    count: usize,
    /// [inner, hidden], and [hidden, inner].
    gate: Matrix,
    down: Matrix,
}

impl ExpertSource for Layer {
    fn layer(&self) -> u64 {
        0
    }

    fn count(&self) -> usize {
        self.count
    }

    fn name(&self, expert: usize, projection: Projection) -> String {
        format!("{} of expert {expert} to measure with", projection.name())
    }

    fn load(&self, _expert: usize, projection: Projection) -> Result<Matrix> {
        Ok(match projection {
            Projection::Gate | Projection::Up => self.gate.clone(),
            Projection::Down => self.down.clone(),
        })
    }
}

impl Layer {
    /// As many experts as there are bytes for.
    fn new(format: Format, bytes: u64, divisor: usize) -> Layer {
        let (inner, hidden) = (INNER / divisor, HIDDEN / divisor);
        let (gate, down) =
            (Random::new(11).matrix(format, inner, hidden), Random::new(12).matrix(format, hidden, inner));
        let of_one = 2 * stored_bytes(&gate) + stored_bytes(&down);
        let count = (bytes / of_one).clamp(LEAST_EXPERTS, MOST_EXPERTS) as usize / CHOSEN * CHOSEN;
        Layer { count, gate, down }
    }

    /// Bytes of an expert that a part reads.
    fn bytes(&self, part: Part) -> u64 {
        let (gate, down) = (stored_bytes(&self.gate), stored_bytes(&self.down));
        match part {
            Part::Gate => gate,
            Part::Down => down,
            Part::Whole => 2 * gate + down,
        }
    }

    /// The part's name with its shape.
    fn told(&self, part: Part) -> String {
        let (inner, hidden) = (self.gate.rows, self.gate.columns);
        match part {
            Part::Gate => format!("gate or up [{inner}, {hidden}]"),
            Part::Down => format!("down [{hidden}, {inner}]"),
            Part::Whole => "gate, up and down".to_owned(),
        }
    }
}

/// All formats, one after the other.
pub(super) fn measures<D: Driver>(bench: &mut Bench<'_, D>) -> Result<Vec<BenchMeasure>, Faults> {
    let mut measures = Vec::new();
    for format in FORMATS {
        let name = format!("experts {}", name_of(format));
        let layer = Layer::new(format, bench.bytes, divisor(bench.bytes));
        let mut wanted = Vec::new();
        for part in [Part::Gate, Part::Down, Part::Whole] {
            let cases = Case::ALL.map(|case| (format!("{name}, {}, {}", layer.told(part), case.name()), part, case));
            wanted.extend(cases.into_iter().filter(|(name, ..)| bench.is_wanted(name)));
        }
        let mut of_format = Vec::new();
        if !wanted.is_empty() {
            bench.progress.step(&name);
            let experts = bench.gpu.upload_experts(&layer)?;
            let mut works = Vec::new();
            for (name, part, case) in wanted {
                works.push(work(bench, &layer, &experts, name, part, case)?);
            }
            of_format = bench.against_reading(&mut works)?;
        }
        measures.extend(bench.with_limits(&name, &[READ], of_format)?);
    }
    Ok(measures)
}

/// A part of all choices of a case, one after the other.
fn work<D: Driver>(
    bench: &Bench<'_, D>,
    layer: &Layer,
    experts: &Experts<D>,
    name: String,
    part: Part,
    case: Case,
) -> Result<Work<D>> {
    let (gpu, rows) = (bench.gpu, case.rows());
    let choices = case.choices(layer.count);
    let bytes = choices.iter().map(|choice| distinct(choice) * layer.bytes(part)).sum();
    let choices: Vec<Choice<D>> = choices.iter().map(|choice| gpu.chosen(choice)).collect::<Result<_>>()?;
    let (n, width) = if part == Part::Down { (rows * CHOSEN, layer.gate.rows) } else { (rows, layer.gate.columns) };
    let x: Rows<D> = gpu.write(&numbers(width, n), width)?;
    let groups: Vec<Groups<D>> = choices.iter().map(|choice| gpu.groups_of(experts, choice)).collect::<Result<_>>()?;
    let work = Work::new(bench.device(), name, || {
        // What they give is kept to the end, as gate's and up's are: none waits for the place of another's.
        let given: Result<Vec<Rows<D>>> = (choices.iter().zip(&groups))
            .map(|(choice, groups)| match part {
                Part::Gate => gpu.projected(experts, Projection::Gate, groups, &x),
                Part::Down => gpu.projected(experts, Projection::Down, groups, &x),
                Part::Whole => gpu.experts(experts, choice, &x),
            })
            .collect();
        given.map(|_| Amount::Bytes(bytes))
    });
    work.map(|work| work.keeping(x, choices, groups))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_expert_is_chosen() {
        for count in [16, 64, 96] {
            for case in Case::ALL {
                let choices = case.choices(count);
                let mut all: Vec<Vec<Routed>> = choices.iter().flatten().cloned().collect();
                assert_eq!(distinct(&all), count as u64, "{case:?}");
                assert!(choices.iter().all(|choice| choice.len() == case.rows()));
                assert!(all.iter().all(|row| distinct(std::slice::from_ref(row)) == CHOSEN as u64));
                all.dedup();
                assert!(case != Case::Same || all.len() == choices.len());
            }
        }
        assert_eq!(distinct(&Case::Others.choices(256)[0]), 64);
        assert_eq!(distinct(&Case::Same.choices(256)[0]), 8);
        assert_eq!(Layer::new(Format::Int4Row, 1 << 20, 16).count, 16);
    }
}
