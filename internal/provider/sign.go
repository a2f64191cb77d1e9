package provider

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
)

// service is the name that requests to Bedrock are signed for.
const service = "bedrock"

// signer is the SDK's own, which is safe for concurrent use. It escapes the
// path once more than it is sent, as every service but S3 wants it.
var signer = v4.NewSigner()

// sign signs a request with AWS Signature Version 4. The length stays out of
// it where a proxy on the way may change how the body is framed.
func sign(r *http.Request, body []byte, c *Credentials, region string, now time.Time) error {
	sum := sha256.Sum256(body)
	keys := aws.Credentials{AccessKeyID: c.AccessKeyID, SecretAccessKey: c.SecretAccessKey, SessionToken: c.SessionToken}
	return signer.SignHTTP(context.Background(), keys, r, hex.EncodeToString(sum[:]), service, region, now)
}
