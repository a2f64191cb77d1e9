package resources

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
)

// Bounds of what is read. They keep a wrong path from filling the memory.
const (
	maxFiles     = 20_000
	maxFileBytes = 4 << 20
	maxBytes     = 128 << 20
	maxProblems  = 1000
)

// Load reads the *.yaml and *.yml files of a folder (not of its subfolders,
// nor files whose name begins with a dot) and compiles them. One that is no regular
// file, such as a pipe, is an Error. The catalog is nil when any problem is one. An
// empty folder is a good, empty catalog.
func Load(dir string) (*Catalog, Problems) { return Options{}.Load(dir) }

// Load is the function Load for files and folders. Problems name files as they
// are given, those of a folder by its path; of a single folder relative to it.
func (o Options) Load(paths ...string) (*Catalog, Problems) {
	var files []file
	for _, path := range paths {
		more, ps := readPath(path, len(paths) == 1)
		if ps.Err() != nil {
			return nil, ps
		}
		files = append(files, more...)
	}
	if ps := tooMuch(files); ps.Err() != nil {
		return nil, ps
	}
	return o.compileFiles(files)
}

// file is the content of one file.
type file struct {
	name string
	data []byte
}

func digest(files []file) [sha256.Size]byte {
	h := sha256.New()
	for _, f := range files {
		fmt.Fprintf(h, "%q %d ", f.name, len(f.data))
		h.Write(f.data)
	}
	return [sha256.Size]byte(h.Sum(nil))
}

func (o Options) compileFiles(files []file) (*Catalog, Problems) {
	parsers := make([]*parser, len(files))
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(len(files), runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(files)); i = next.Add(1) - 1 {
				parsers[i] = &parser{}
				parsers[i].file(files[i])
			}
		})
	}
	wg.Wait()
	all := &parser{}
	for _, p := range parsers {
		all.add(p)
	}
	return o.finish(all)
}

func badFile(name, format string, args ...any) Problems {
	return Problems{{Severity: Error, File: name, Message: fmt.Sprintf(format, args...)}}
}

func tooMuch(files []file) Problems {
	total := 0
	for _, f := range files {
		if total += len(f.data); total > maxBytes {
			return badFile(f.name, "all files together are larger than %d MiB", maxBytes>>20)
		}
	}
	return nil
}

// readPath reads a file, or the files of a folder. Their names are relative to
// it when it is alone.
func readPath(path string, alone bool) ([]file, Problems) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, badFile(path, "read: %v", cause(err))
	case !info.IsDir():
		f, ps := readFile(path, path)
		return []file{f}, ps
	}
	files, ps := read(path)
	for i := range files {
		if !alone {
			files[i].name = filepath.Join(path, files[i].name)
		}
	}
	return files, ps
}

// read reads a folder. Names are relative to it.
func read(dir string) ([]file, Problems) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, badFile(dir, "read folder: %v", cause(err))
	}
	var files []file
	for _, e := range entries {
		name := e.Name()
		if ext := filepath.Ext(name); strings.HasPrefix(name, ".") || ext != ".yaml" && ext != ".yml" {
			continue
		}
		path := filepath.Join(dir, name)
		// Stat follows the links of a mounted ConfigMap.
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			continue
		} else if err == nil && !info.Mode().IsRegular() { // a pipe would hold us up until somebody writes
			return nil, badFile(name, "is no regular file: only those are read in a folder")
		}
		if len(files) == maxFiles {
			return nil, badFile(dir, "folder has more than %d files", maxFiles)
		}
		f, ps := readFile(path, name)
		if ps != nil {
			return nil, ps
		}
		files = append(files, f)
	}
	return files, tooMuch(files)
}

func readFile(path, name string) (file, Problems) {
	f, err := os.Open(path)
	if err != nil {
		return file{}, badFile(name, "read file: %v", cause(err))
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1)) // one that is named may be a pipe, whose size nobody knows
	switch {
	case err != nil:
		return file{}, badFile(name, "read file: %v", cause(err))
	case len(data) > maxFileBytes:
		return file{}, badFile(name, "file is larger than %d MiB", maxFileBytes>>20)
	}
	return file{name, data}, nil
}

// cause strips the path from an error of package os: problems name the file.
func cause(err error) error {
	var pe *os.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}
