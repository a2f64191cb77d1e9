package classify

import (
	"crypto/sha256"
	_ "embed" // the weights
	"encoding/hex"
	"encoding/json"
	"fmt"
	"sync"
)

// detectorVersion changes with what detectors find; it is part of every cache key.
const detectorVersion = "1"

// headsFile holds the hashed weights of all heads, headsJSON what else they
// need; see TrainHeads.
//
//go:embed data/heads.bin.gz
var headsFile []byte

//go:embed data/heads.json
var headsJSON []byte

// models are the embedded lists and weights, loaded once in a process.
type models struct {
	lexicon         *lexicon
	secrets         *secretSet
	tagger          *tagger
	heads           *heads
	versions        Versions
	idsByLength     [20][]int
	lettersByLength [20][]int
	idContext       []uint8 // context of digitIDs
	letterContext   []uint8
	hetu            int
}

var load = sync.OnceValues(func() (*models, error) {
	m := &models{}
	var err error
	if m.lexicon, err = loadLexicon(); err != nil {
		return nil, err
	}
	if m.secrets, err = loadSecrets(); err != nil {
		return nil, err
	}
	if m.tagger, err = loadTagger(); err != nil {
		return nil, err
	}
	if m.heads, err = loadHeads(); err != nil {
		return nil, err
	}
	for i := range digitIDs {
		id := &digitIDs[i]
		for n := id.min; n <= id.max; n++ {
			m.idsByLength[n] = append(m.idsByLength[n], i)
		}
		m.idContext = append(m.idContext, contextIDs[id.name])
	}
	for i := range letterIDs {
		id := &letterIDs[i]
		m.letterContext = append(m.letterContext, contextIDs[id.name])
		if id.name == "fi-hetu" {
			m.hetu = i
			continue
		}
		m.lettersByLength[len(id.form)] = append(m.lettersByLength[len(id.form)], i)
	}
	h := sha256.New()
	for _, f := range [][]byte{lexiconFile, []byte(secretRules), taggerFile, headsFile, headsJSON} {
		fmt.Fprintf(h, "%d:", len(f))
		h.Write(f) // never fails
	}
	m.versions = Versions{Detectors: detectorVersion, Weights: hex.EncodeToString(h.Sum(nil)[:12])}
	return m, nil
})

// Heads over hashed words.
const (
	headDifficulty = iota // a small model fails
	headInjection
	headDemand // asked of an expert rather than in passing
	headCount
)

const headBits = 17

// heads are linear models: four bytes a feature lie together.
type heads struct {
	w [][4]int8
	headParams
}

// headParams are what the heads need besides the hashed weights.
type headParams struct {
	// Scale of the hashed weights, and Bias, of each head.
	Scale, Bias [headCount]float32
	// Dense weights of difficulty and demand, in the order of features.dense.
	Dense [headCount][]float32
	// Demand is the weight of demand beside difficulty.
	Demand float32
	// Calibration of complexity that ships.
	Calibration Calibration
	// InjectionThreshold is the raw score that counts as 0.5.
	InjectionThreshold float32
	// Trained names the data and their hashes.
	Trained map[string]string
}

func loadHeads() (*heads, error) {
	h := &heads{}
	if err := json.Unmarshal(headsJSON, &h.headParams); err != nil {
		return nil, fmt.Errorf("heads: %w", err)
	}
	raw, err := unzip(headsFile)
	if err != nil {
		return nil, fmt.Errorf("heads: %w", err)
	}
	if len(raw) != 4<<headBits {
		return nil, fmt.Errorf("heads: %d bytes", len(raw))
	}
	h.w = make([][4]int8, 1<<headBits)
	for i := range h.w {
		for k := range 4 {
			h.w[i][k] = int8(raw[4*i+k])
		}
	}
	for k := range headCount {
		if n := len(h.Dense[k]); n != 0 && n != denseCount {
			return nil, fmt.Errorf("heads: head %d has %d dense weights, want %d", k, n, denseCount)
		}
	}
	return h, nil
}
