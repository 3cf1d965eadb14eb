// Which tokens the queries and keys of attention on AMD's matrix cores are: those of whole samples, or for context
// parallelism those of a part's slices of every sample, whose rows are as in sliced_attention.cu.

// Adjacent tokens of a sample: rows first to end of a tensor. Row r is at position r + offset.
struct Slice {
    int first, end, offset;

    __device__ int position() const { return first + offset; }
};

struct Shape {
    int sequence, heads, kv_heads;
    float scale;

    __device__ int qkv_row() const { return (heads + 2 * kv_heads) * HEAD_DIM; }
    __device__ int out_row() const { return heads * HEAD_DIM; }
    // Offset of head `head` of sample `sample` in interleaved rows of `row` elements.
    __device__ size start(int sample, int head, int row) const {
        return (size)sample * sequence * row + head * HEAD_DIM;
    }
    __device__ size first_score(int sample, int head) const { return (size)(sample * heads + head) * sequence; }
    // The factor of the scores before powers of two are taken.
    __device__ float factor() const { return scale * LOG2_E; }
};

// Whole samples. Queries, keys and values are in one tensor.
struct Whole {
    static constexpr int QUERY_SLICES = 1;
    Shape shape;

    __device__ int key_slices() const { return 1; }
    __device__ Slice queries(int) const { return Slice{0, shape.sequence, 0}; }
    __device__ Slice keys(int) const { return Slice{0, shape.sequence, 0}; }
    // What a block owns: BLOCK rows, or those up to the end of the slice.
    __device__ Slice query_block(int block) const { return Slice{block * BLOCK, shape.sequence, 0}; }
    __device__ Slice key_block(int block) const { return Slice{block * BLOCK, shape.sequence, 0}; }
    __device__ int key_row() const { return shape.qkv_row(); }
    // Offset of the keys of a sample. Values are kv_heads heads later.
    __device__ size key_start(int sample, int kv) const { return shape.start(sample, shape.heads + kv, key_row()); }
};

// The slices of part `part`, and keys of parts first_owner and following. Rows of keys are numbered across owners.
struct Parts {
    static constexpr int QUERY_SLICES = 2;
    int parts, part, first_owner, owners;
    Shape shape;

    __device__ int key_slices() const { return 2 * owners; }
    __device__ Slice queries(int i) const { return slice(part, i, 0); }
    __device__ Slice keys(int i) const { return slice(first_owner + i / 2, i % 2, i / 2 * gridDim.z * shape.sequence); }
    __device__ Slice query_block(int block) const {
        return find(block, [&](int i) { return queries(i); });
    }
    __device__ Slice key_block(int block) const {
        return find(block, [&](int i) { return keys(i); });
    }
    __device__ int key_row() const { return 2 * shape.kv_heads * HEAD_DIM; }
    __device__ size key_start(int sample, int kv) const { return shape.start(sample, kv, key_row()); }

  private:
    // Slice i of a part, whose first row is `row`.
    __device__ Slice slice(int of, int i, int row) const {
        const int length = shape.sequence / 2;
        if (i == 0) return Slice{row, row + length, of * length - row};
        return Slice{row + length, row + shape.sequence, (2 * parts - 2 - of) * length - row};
    }
    template <class Slices> __device__ Slice find(int block, Slices slices) const {
        for (int i = 0;; ++i) {
            Slice slice = slices(i);
            const int blocks = (slice.end - slice.first + BLOCK - 1) / BLOCK;
            if (block < blocks) {
                slice.first += block * BLOCK;
                return slice;
            }
            block -= blocks;
        }
    }
};

// The first position that the query of each row of a sample attends to. Without a mask, or with null, that is 0.
template <bool masked> struct Starts {
    const token *starts;
    size sample_start;

    __device__ bool exist() const { return masked && starts; }
    __device__ int of(int row) const { return exist() ? (int)starts[sample_start + row] : 0; }
    // For a row that is the same in all lanes, so that what follows from it takes no vector registers.
    __device__ int uniform(int row) const { return __builtin_amdgcn_readfirstlane(of(row)); }
};

// The keys that the queries of one wave attend to, by position: all earlier ones, or with a mask those from their starts on.
template <bool masked> struct Sight {
    int query, start;                          // of this lane
    int first, last, first_start, last_start;  // of the wave

    // `own` begins with the wave's first query.
    __device__ Sight(Starts<masked> starts, Slice own, int column)
        : query(own.position() + column), first(own.position()), last(min(own.first + OWN, own.end) - 1 + own.offset) {
        start = starts.of(min(own.first + column, own.end - 1));
        first_start = starts.uniform(min(own.first, own.end - 1));
        last_start = starts.uniform(last - own.offset);
    }
    // Whether any of them attends to any of the tile's first `count` keys, and whether all attend to all.
    __device__ bool any(Slice tile, int count) const {
        return first <= last && tile.position() <= last && tile.position() + count > first_start;
    }
    __device__ bool all(Slice tile, int count) const {
        return tile.position() + count - 1 <= first && tile.first + count <= tile.end && tile.position() >= last_start;
    }
    // Sets the scores of keys that are not visible.
    __device__ void hide(tile &scores, Slice keys, float to) const {
        const Lane lane;
        const int last = min(query, keys.end - 1 + keys.offset);
#pragma unroll
        for (int r = 0; r < 16; ++r) {
            const int key = keys.position() + lane.row(r);
            if (key > last || (masked && key < start)) scores[r] = to;
        }
    }
};

// The tiles of keys that a block of queries attends to: at positions from `from`'s tile to `last`. A tile is inside one
// slice, and is the rest of it.
template <int KEYS, class Layout> struct KeyTiles {
    Layout layout;
    int from, last, index;
    Slice tile;

    __device__ KeyTiles(Layout layout, int from, int last) : layout(layout), from(from), last(last), index(0) {
        tile = first_tile();
        skip();
    }
    __device__ bool exist() const { return tile.position() <= last && tile.first < tile.end; }
    __device__ void next() {
        tile.first += KEYS;
        skip();
    }

  private:
    __device__ Slice first_tile() const {
        Slice slice = layout.keys(index);
        slice.first += max(from - slice.position(), 0) / KEYS * KEYS;
        return slice;
    }
    // Continues with the next slice that has such a tile.
    __device__ void skip() {
        while (!exist() && ++index < layout.key_slices()) tile = first_tile();
    }
};

// The tiles of one head's queries that attend to keys of a block, whose positions are first_key to last_key.
template <int QUERIES, bool masked, class Layout> struct QueryTiles {
    // The second is empty if there is one slice.
    Slice slices[2];
    int counts[2];

    __device__ QueryTiles(Layout layout, Starts<masked> starts, int first_key, int last_key) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            slices[i] = layout.queries(i);
            slices[i].first += max(first_key - slices[i].position(), 0);
            counts[i] = i < Layout::QUERY_SLICES ? tiles_that_see(slices[i], starts, last_key) : 0;
        }
    }
    __device__ int count() const { return counts[0] + counts[1]; }
    __device__ Slice operator[](int i) const {
        const bool second = Layout::QUERY_SLICES == 2 && i >= counts[0];
        const int first = second ? slices[1].first - counts[0] * QUERIES : slices[0].first;
        return Slice{first + i * QUERIES, second ? slices[1].end : slices[0].end,
                     second ? slices[1].offset : slices[0].offset};
    }

  private:
    __device__ static int tiles_that_see(Slice slice, Starts<masked> starts, int last_key) {
        const int tiles = (max(slice.end - slice.first, 0) + QUERIES - 1) / QUERIES;
        if (!starts.exist()) return tiles;
        int seeing = 0;
        for (int tile = 0; tile < tiles; tile += WARP) {
            const int row = slice.first + (tile + (int)threadIdx.x % WARP) * QUERIES;
            seeing += __popcll(BALLOT(row < slice.end && starts.of(min(row, slice.end - 1)) <= last_key));
        }
        return seeing;
    }
};
