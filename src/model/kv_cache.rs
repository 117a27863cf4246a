//! What later tokens need of each position, layer by layer.

use crate::backend::Backend;
use crate::config::Config;
use crate::error::Result;

/// The cache of one layer.
pub struct LayerCache<B: Backend> {
    /// Normalized latent and turned shared key of each position: [T, kv_lora_rank + rope].
    pub(super) kv: B::Cache,
    /// Turned indexer key of each position: [T, index_head_dim]. Stays empty in a layer without an indexer.
    pub(super) index_keys: Option<B::Cache>,
}

impl<B: Backend> LayerCache<B> {
    fn new(backend: &B, config: &Config, index_keys: bool) -> Result<LayerCache<B>> {
        let width = config.kv_lora_rank + config.qk_rope_head_dim;
        Ok(LayerCache {
            kv: backend.cache(width as usize)?,
            index_keys: index_keys.then(|| backend.cache(config.index_head_dim as usize)).transpose()?,
        })
    }

    fn truncate(&mut self, backend: &B, len: usize) {
        for cache in [Some(&mut self.kv), self.index_keys.as_mut()].into_iter().flatten() {
            if backend.cache_len(cache) > len {
                backend.truncate(cache, len);
            }
        }
    }
}

/// The cache of a text: of all hidden layers and, apart, of the MTP layer.
pub struct KvCache<B: Backend> {
    layers: Vec<LayerCache<B>>,
    mtp: LayerCache<B>,
    len: usize,
    index_topk: usize,
}

impl<B: Backend> KvCache<B> {
    pub(super) fn new(backend: &B, config: &Config, index_topk: usize) -> Result<KvCache<B>> {
        Ok(KvCache {
            layers: (0..config.num_hidden_layers)
                .map(|_| LayerCache::new(backend, config, true))
                .collect::<Result<_>>()?,
            mtp: LayerCache::new(backend, config, false)?,
            len: 0,
            index_topk,
        })
    }

    /// Positions that went through the hidden layers.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing went through yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions that went through the MTP layer.
    pub fn mtp_len(&self, backend: &B) -> usize {
        backend.cache_len(&self.mtp.kv)
    }

    /// How many positions sparse attention looks at.
    pub fn index_topk(&self) -> usize {
        self.index_topk
    }

    /// Forgets the positions of the hidden layers from `len` on.
    pub fn truncate(&mut self, backend: &B, len: usize) {
        self.layers.iter_mut().for_each(|layer| layer.truncate(backend, len));
        self.len = self.len.min(len);
    }

    /// Forgets the positions of the MTP layer from `len` on.
    pub fn truncate_mtp(&mut self, backend: &B, len: usize) {
        self.mtp.truncate(backend, len);
    }

    pub(super) fn layers_mut(&mut self) -> &mut [LayerCache<B>] {
        &mut self.layers
    }

    pub(super) fn mtp_mut(&mut self) -> &mut LayerCache<B> {
        &mut self.mtp
    }

    pub(super) fn set_len(&mut self, len: usize) {
        self.len = len;
    }
}
