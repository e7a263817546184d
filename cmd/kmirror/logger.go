package main

import (
	"os"
	"sync"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kmirror/config"
)

// newLogger returns the logger that the settings ask for; it writes to the standard error output.
func newLogger(c config.Log) (*zap.Logger, error) {
	level, err := zapcore.ParseLevel(c.Level)
	if err != nil {
		return nil, err
	}
	encoding := zap.NewProductionEncoderConfig()
	encoding.EncodeTime = zapcore.ISO8601TimeEncoder
	encoding.EncodeDuration = zapcore.StringDurationEncoder
	encoder := zapcore.NewJSONEncoder(encoding)
	if c.Format == "text" {
		encoding.EncodeLevel = zapcore.CapitalLevelEncoder
		encoder = zapcore.NewConsoleEncoder(encoding)
	}
	return zap.New(zapcore.NewCore(encoder, zapcore.Lock(os.Stderr), level)), nil
}

// accessFile is where the access log goes. It's opened anew when asked to, so that it can be moved away.
type accessFile struct {
	path string // "stdout" is the standard output

	mu   sync.Mutex
	file *os.File
}

func openAccessFile(path string) (*accessFile, error) {
	f := &accessFile{path: path, file: os.Stdout}
	return f, f.reopen()
}

func (f *accessFile) reopen() error {
	if f.path == "stdout" {
		return nil
	}
	file, err := os.OpenFile(f.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.file != os.Stdout {
		f.file.Close()
	}
	f.file = file
	return nil
}

func (f *accessFile) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.file.Write(p)
}

// newAccessLogger writes one JSON object for each event.
func newAccessLogger(f *accessFile) *zap.Logger {
	encoding := zapcore.EncoderConfig{MessageKey: "event", EncodeTime: zapcore.RFC3339NanoTimeEncoder, EncodeDuration: zapcore.SecondsDurationEncoder}
	return zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(encoding), zapcore.AddSync(f), zapcore.InfoLevel))
}
