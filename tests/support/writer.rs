//! A downloader that takes its time.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use super::disk::Random;

/// How a file arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// From front to back, under its name.
    Growing,
    /// Under its name with this ending, then renamed.
    Renamed(&'static str),
    /// Under its name, from holes filled in random order.
    Holes,
    /// Under its name, in space taken before, with a file of this ending beside it until it is whole.
    Marked(&'static str),
}

impl How {
    pub const ALL: [How; 6] = [
        How::Growing,
        How::Renamed(".part"),
        How::Renamed(".incomplete"),
        How::Holes,
        How::Marked(".aria2"),
        How::Marked(".part"),
    ];
}

/// Writes files of one directory into another.
pub struct Writer {
    pub from: PathBuf,
    pub to: PathBuf,
    /// Time between two pieces.
    pub pause: Duration,
}

impl Writer {
    /// Writes one file, in pieces.
    pub fn write(&self, name: &str, how: How, random: &mut Random) {
        let bytes = fs::read(self.from.join(name)).unwrap();
        let ending = if let How::Renamed(ending) = how { ending } else { "" };
        let path = self.to.join(format!("{name}{ending}"));
        let mark = if let How::Marked(ending) = how { Some(self.to.join(format!("{name}{ending}"))) } else { None };
        mark.iter().for_each(|mark| fs::write(mark, "").unwrap());
        let file = OpenOptions::new().write(true).create_new(true).open(&path).unwrap();
        // Whole pages, so that a hole is one.
        let piece = (bytes.len() / 4).next_multiple_of(4096);
        let mut pieces: Vec<(usize, &[u8])> = bytes.chunks(piece).enumerate().collect();
        match how {
            How::Growing | How::Renamed(_) => {}
            How::Holes => {
                file.set_len(bytes.len() as u64).unwrap();
                random.shuffle(&mut pieces);
            }
            How::Marked(_) => {
                file.write_all_at(&vec![0; bytes.len()], 0).unwrap();
                random.shuffle(&mut pieces);
            }
        }
        for (number, piece_bytes) in pieces {
            std::thread::sleep(self.pause);
            file.write_all_at(piece_bytes, (number * piece) as u64).unwrap();
        }
        drop::<File>(file);
        if let How::Renamed(_) = how {
            fs::rename(path, self.to.join(name)).unwrap();
        }
        mark.iter().for_each(|mark| fs::remove_file(mark).unwrap());
    }

    /// Writes all files in random order, each in a random way.
    pub fn write_all(&self, random: &mut Random) {
        let mut names = super::processes::names(&self.from);
        random.shuffle(&mut names);
        for name in names {
            let how = How::ALL[random.below(How::ALL.len())];
            self.write(&name, how, random);
        }
    }
}
