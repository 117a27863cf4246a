//! A checkpoint in memory, to be changed and stored elsewhere: for tests of everything that can be wrong with one.
//!
//! The index is made anew from the tensors when storing, so that it is right unless it is changed on purpose, which
//! [`Shards::index_entry`], [`Shards::unindex`], [`Shards::total_size`] and [`Shards::without_index`] do. Nothing checks
//! that a tensor's bytes fit its type and shape. What cannot be said this way is done to the stored files by
//! [`edit_file`] and [`edit_header`].

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use coliconv::checkpoint::INDEX_FILE;
use coliconv::config::CONFIG_FILE;
use coliconv::header::{self, Header, StoredTensor};
use coliconv::io::SourceFile;
use coliconv::tensor::Dtype;
use serde_json::{Value, json};

/// A tensor with its data.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// A tensor of these bytes.
    pub fn new(dtype: Dtype, shape: &[u64], bytes: Vec<u8>) -> Tensor {
        Tensor { dtype, shape: shape.to_vec(), bytes }
    }

    /// A tensor of as many zero bytes as it needs.
    pub fn zeros(dtype: Dtype, shape: &[u64]) -> Tensor {
        let bytes = (shape.iter().product::<u64>() * dtype.bits()).div_ceil(8);
        Tensor::new(dtype, shape, vec![0; bytes as usize])
    }

    /// A tensor of F32 values.
    pub fn f32(shape: &[u64], values: &[f32]) -> Tensor {
        Tensor::new(Dtype::F32, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    /// Replaces an element's bytes, counted in whole bytes.
    pub fn set(&mut self, element: usize, bytes: &[u8]) {
        let width = (self.dtype.bits() / 8) as usize;
        assert_eq!(bytes.len(), width, "an element of {} has {width} bytes", self.dtype);
        self.bytes[element * width..][..width].copy_from_slice(bytes);
    }

    /// The F32 values.
    pub fn to_f32(&self) -> Vec<f32> {
        assert_eq!(self.dtype, Dtype::F32);
        self.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }
}

/// One .safetensors file: names may repeat.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Shard {
    pub metadata: Option<BTreeMap<String, String>>,
    /// In the order of the data.
    pub tensors: Vec<(String, Tensor)>,
}

/// A whole checkpoint in memory.
#[derive(Debug, Clone, Default)]
pub struct Shards {
    /// The weight files by name.
    pub files: BTreeMap<String, Shard>,
    /// All other files by name; without the index, and without config.json, which is `config`.
    pub others: BTreeMap<String, Vec<u8>>,
    /// config.json; stored as it was read unless it is changed.
    pub config: Value,
    read_config: Option<(Value, Vec<u8>)>,
    /// What the index says other than the files: another file, or nothing.
    index_edits: BTreeMap<String, Option<String>>,
    /// `total_size` where it is not the sum of the indexed tensors' bytes.
    total_size: Option<Value>,
    without_index: bool,
}

impl Shards {
    /// Reads a checkpoint whose headers are good. Directories in it are left out.
    pub fn load(directory: &Path) -> Shards {
        let mut shards = Shards { without_index: true, ..Shards::default() };
        let mut index = None;
        for entry in fs::read_dir(directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display())) {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
            } else if name.ends_with(".safetensors") {
                shards.files.insert(name, load_shard(&path));
            } else if name == INDEX_FILE {
                index = Some(fs::read(path).unwrap());
            } else {
                shards.others.insert(name, fs::read(path).unwrap());
            }
        }
        if let Some(bytes) = shards.others.remove(CONFIG_FILE) {
            shards.config = serde_json::from_slice(&bytes).unwrap();
            shards.read_config = Some((shards.config.clone(), bytes));
        }
        if let Some(index) = index {
            shards.without_index = false;
            shards.keep_differences(&serde_json::from_slice(&index).unwrap());
        }
        shards
    }

    /// Notes where an index says other than the files.
    fn keep_differences(&mut self, index: &Value) {
        let derived = self.index();
        let map = |index: &Value| index["weight_map"].as_object().expect("an index").clone();
        let (mut read, right) = (map(index), map(&derived));
        for (name, file) in &right {
            match read.remove(name) {
                Some(same) if same == *file => {}
                Some(other) => drop(self.index_edits.insert(name.clone(), other.as_str().map(str::to_owned))),
                None => drop(self.index_edits.insert(name.clone(), None)),
            }
        }
        let only_read = read.into_iter().map(|(name, file)| (name, file.as_str().map(str::to_owned)));
        self.index_edits.extend(only_read);
        let size = |index: &Value| index["metadata"]["total_size"].clone();
        self.total_size = Some(size(index)).filter(|found| *found != size(&derived));
    }

    /// Writes the checkpoint into a directory, which is made if it does not exist and must be empty.
    pub fn store(&self, directory: &Path) {
        fs::create_dir_all(directory).unwrap();
        let empty = fs::read_dir(directory).unwrap().next().is_none();
        assert!(empty, "{} holds files already", directory.display());
        for (name, shard) in &self.files {
            fs::write(directory.join(name), shard.to_bytes()).unwrap();
        }
        for (name, bytes) in &self.others {
            fs::write(directory.join(name), bytes).unwrap();
        }
        match &self.read_config {
            Some((value, bytes)) if *value == self.config => fs::write(directory.join(CONFIG_FILE), bytes).unwrap(),
            _ if self.config.is_null() => {}
            _ => fs::write(directory.join(CONFIG_FILE), self.config.to_string()).unwrap(),
        }
        if !self.without_index {
            fs::write(directory.join(INDEX_FILE), self.index().to_string()).unwrap();
        }
    }

    /// The index that is stored.
    pub fn index(&self) -> Value {
        let tensors = || self.files.iter().flat_map(|(file, s)| s.tensors.iter().map(move |(n, t)| (n, t, file)));
        let mut map: BTreeMap<&str, &str> = tensors().map(|(name, _, file)| (name.as_str(), file.as_str())).collect();
        for (name, file) in &self.index_edits {
            match file {
                Some(file) => map.insert(name, file),
                None => map.remove(name.as_str()),
            };
        }
        let indexed = tensors().filter(|(name, ..)| map.contains_key(name.as_str()));
        let total: u64 = indexed.map(|(_, tensor, _)| tensor.bytes.len() as u64).sum();
        match self.total_size.clone().unwrap_or_else(|| total.into()) {
            Value::Null => json!({"metadata": {}, "weight_map": map}),
            total => json!({"metadata": {"total_size": total}, "weight_map": map}),
        }
    }

    /// Every name with its file, file by file.
    pub fn names(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().flat_map(|(file, s)| s.tensors.iter().map(move |(name, _)| (name.as_str(), file.as_str())))
    }

    /// The file that holds a tensor.
    pub fn file_of(&self, name: &str) -> String {
        self.locate(name).0
    }

    /// A tensor.
    pub fn tensor(&self, name: &str) -> &Tensor {
        let (file, place) = self.locate(name);
        &self.files[&file].tensors[place].1
    }

    /// A tensor, to be changed: `dtype`, `shape` and `bytes` are independent of each other.
    pub fn tensor_mut(&mut self, name: &str) -> &mut Tensor {
        &mut self.entry(name).1
    }

    /// Takes a tensor out.
    pub fn remove(&mut self, name: &str) -> Tensor {
        let (file, place) = self.locate(name);
        self.shard(&file).tensors.remove(place).1
    }

    /// Keeps the tensors whose names are wanted.
    pub fn retain(&mut self, wanted: impl Fn(&str) -> bool) {
        for shard in self.files.values_mut() {
            shard.tensors.retain(|(name, _)| wanted(name));
        }
    }

    /// Gives a tensor another name at the same place.
    pub fn rename(&mut self, from: &str, to: &str) {
        self.entry(from).0 = to.to_owned();
    }

    /// Moves a tensor to another file, as [`Shards::add`] does.
    pub fn move_to(&mut self, name: &str, file: &str) {
        let tensor = self.remove(name);
        self.add(file, name, tensor);
    }

    /// Adds a tensor to a file, which is made if there is none of that name; a second one of the same name, too. It goes
    /// before the tensors of narrower elements, so that everything stays aligned.
    pub fn add(&mut self, file: &str, name: &str, tensor: Tensor) {
        let tensors = &mut self.shard(file).tensors;
        let narrower = tensors.iter().position(|(_, other)| other.dtype.bits() < tensor.dtype.bits());
        tensors.insert(narrower.unwrap_or(tensors.len()), (name.to_owned(), tensor));
    }

    /// Changes a key of config.json, in an object of it by `object.key`; `null` removes it.
    pub fn set_config(&mut self, key: &str, value: Value) {
        let (parents, last) = key.rsplit_once('.').unwrap_or(("", key));
        let object = parents.split('.').filter(|k| !k.is_empty()).fold(&mut self.config, |object, k| &mut object[k]);
        let object = object.as_object_mut().expect("an object");
        if value.is_null() {
            object.remove(last);
        } else {
            object.insert(last.to_owned(), value);
        }
    }

    /// Makes the index place a tensor, which may not exist, in a file, which may neither exist nor be a proper name.
    pub fn index_entry(&mut self, name: &str, file: &str) {
        self.index_edits.insert(name.to_owned(), Some(file.to_owned()));
    }

    /// Makes the index leave out a tensor.
    pub fn unindex(&mut self, name: &str) {
        self.index_edits.insert(name.to_owned(), None);
    }

    /// Makes the index leave out a whole file, as one that lies beside the others.
    pub fn unindex_file(&mut self, file: &str) {
        let names: Vec<String> = self.shard(file).tensors.iter().map(|(name, _)| name.clone()).collect();
        self.index_edits.extend(names.into_iter().map(|name| (name, None)));
    }

    /// Makes the index state another total; `null` for none.
    pub fn total_size(&mut self, total: Value) {
        self.total_size = Some(total);
    }

    /// Stores no index.
    pub fn without_index(&mut self) {
        self.without_index = true;
    }

    /// File and place of a tensor; of several of a name the first.
    fn locate(&self, name: &str) -> (String, usize) {
        let place = |shard: &Shard| shard.tensors.iter().position(|(other, _)| other == name);
        let found = self.files.iter().find_map(|(file, shard)| Some((file.clone(), place(shard)?)));
        found.unwrap_or_else(|| panic!("no tensor {name}"))
    }

    fn entry(&mut self, name: &str) -> &mut (String, Tensor) {
        let (file, place) = self.locate(name);
        &mut self.shard(&file).tensors[place]
    }

    fn shard(&mut self, file: &str) -> &mut Shard {
        self.files.entry(file.to_owned()).or_default()
    }
}

impl Shard {
    /// The file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut offset = 0;
        let mut stored = Vec::with_capacity(self.tensors.len());
        for (name, tensor) in &self.tensors {
            let (bytes, shape) = (tensor.bytes.len() as u64, tensor.shape.clone().into());
            stored.push(StoredTensor { name: name.as_str().into(), dtype: tensor.dtype, shape, offset, bytes });
            offset += bytes;
        }
        let mut file = header::encode(self.metadata.as_ref(), &stored);
        for (_, tensor) in &self.tensors {
            file.extend_from_slice(&tensor.bytes);
        }
        file
    }
}

fn load_shard(path: &Path) -> Shard {
    let file = SourceFile::open(path).unwrap();
    let header = Header::read(&file).unwrap();
    let load = |stored: &StoredTensor| {
        let mut bytes = vec![0; stored.bytes as usize];
        file.read_at(&mut bytes, stored.offset).unwrap();
        (stored.name.as_str().to_owned(), Tensor::new(stored.dtype, stored.shape.dims(), bytes))
    };
    Shard { metadata: header.metadata().cloned(), tensors: header.tensors().iter().map(load).collect() }
}

/// Changes the bytes of a file: flips, cuts, appends.
pub fn edit_file(path: &Path, edit: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    edit(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Changes the text of a .safetensors file's header, which may become anything; the data follow as before.
pub fn edit_header(path: &Path, edit: impl FnOnce(&mut Vec<u8>)) {
    edit_file(path, |bytes| {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut text = bytes[8..8 + length].to_vec();
        edit(&mut text);
        bytes[..8].copy_from_slice(&(text.len() as u64).to_le_bytes());
        bytes.splice(8..8 + length, text);
    });
}
