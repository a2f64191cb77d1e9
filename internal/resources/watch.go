package resources

import (
	"context"
	"crypto/sha256"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// debounce is how long the folder must be quiet: editors and kubelet
	// make several changes for one.
	debounce = 100 * time.Millisecond
	// recheck finds what notification misses: network file systems, and a
	// folder that was removed and made again.
	recheck = 5 * time.Second
)

// Source follows a folder. Use NewSource.
type Source struct {
	dir    string
	apply  func(*Catalog, Problems)
	mu     sync.Mutex
	last   Problems
	digest [sha256.Size]byte
	loaded bool
}

// NewSource returns a source of the folder dir. Once Run has started, apply is
// called with the first load and then whenever the content has changed, from
// one goroutine. The catalog is nil when the content has errors: keep the one
// before.
func NewSource(dir string, apply func(*Catalog, Problems)) *Source {
	return &Source{dir: dir, apply: apply}
}

// Problems returns those of the newest load.
func (s *Source) Problems() Problems {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

// Run loads the folder and follows it until ctx is done. A folder that is
// missing or unreadable is a Problem, not an error.
func (s *Source) Run(ctx context.Context) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		// Out of inotify instances: recheck alone still follows the folder.
		w = &fsnotify.Watcher{Events: make(chan fsnotify.Event), Errors: make(chan error)}
	} else {
		defer w.Close()
	}
	add := func() {
		if err == nil {
			_ = w.Add(s.dir) // again after the folder was replaced; else without effect
		}
	}
	add()
	s.load()
	quiet := time.NewTimer(debounce)
	quiet.Stop()
	tick := time.NewTicker(recheck)
	defer tick.Stop()
	defer quiet.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case ev := <-w.Events:
			if relevant(ev) {
				quiet.Reset(debounce)
			}
		case <-w.Errors: //nolint:errcheck // an overflow: something changed
			quiet.Reset(debounce)
		case <-quiet.C:
			s.load()
		case <-tick.C:
			add()
			s.load()
		}
	}
}

// relevant leaves out what editors write beside the file, but not ..data, the
// link by which kubelet replaces all files of a ConfigMap at once.
func relevant(ev fsnotify.Event) bool {
	name := filepath.Base(ev.Name)
	if name == "..data" {
		return true
	}
	ext := filepath.Ext(name)
	return ev.Op != fsnotify.Chmod && (ext == ".yaml" || ext == ".yml" || ext == "" || name == filepath.Base(filepath.Dir(ev.Name)))
}

// load reads the folder and applies what is new. A folder with errors is
// checked again even when it did not change, because what its files refer to
// (a tokenizer's folder) may have appeared.
func (s *Source) load() {
	files, ps := read(s.dir)
	sum := digest(files)
	if ps.Err() != nil {
		sum = sha256.Sum256([]byte(ps.Err().Error()))
	}
	before := s.Problems()
	same := s.loaded && sum == s.digest
	if same && before.Err() == nil {
		return
	}
	var c *Catalog
	if ps.Err() == nil {
		c, ps = Options{}.compileFiles(files)
	}
	if same && c == nil && slices.Equal(ps, before) {
		return
	}
	s.mu.Lock()
	s.last = ps
	s.mu.Unlock()
	s.loaded, s.digest = true, sum
	s.apply(c, ps)
}
